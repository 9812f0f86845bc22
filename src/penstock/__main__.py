"""`python -m penstock` is the command `penstock`; so is this file, as the application of `spark-submit`."""

import os
import sys

if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    sys.path.pop(0)  # run as a file: its neighbours are modules of Penstock, not modules of their own

from penstock.cli import main

main()
