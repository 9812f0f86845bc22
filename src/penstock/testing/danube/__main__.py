"""`python __main__.py PORT DIRECTORY OPTIONS`: run by its path, without all that the kit imports, to start in a moment."""

import asyncio
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

if __name__ == "__main__":
    for name, place in (("penstock.testing", 1), ("penstock.testing.danube", 0)):
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(Path(__file__).parents[place])]
        sys.modules[name] = module_from_spec(spec)
    from penstock.testing.danube.options import Options
    from penstock.testing.danube.server import serve

    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2]), Options.load(sys.argv[3])))
