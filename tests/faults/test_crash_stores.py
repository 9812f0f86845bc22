"""The crash suite over sinks that write to GCS and Azure: what differs from S3 is how a store refuses a second writer."""

import pytest
from test_crash_s3 import TestDeltaS3Crash as DeltaCrash
from test_crash_s3 import TestFilesS3Crash as FilesCrash
from test_crash_s3 import TestIcebergS3Crash as IcebergCrash

from s3_targets import InAzure, InGcs

pytestmark = pytest.mark.soak


class TestDeltaGcsCrash(InGcs, DeltaCrash):
    pass


class TestFilesGcsCrash(InGcs, FilesCrash):
    pass


class TestIcebergGcsCrash(InGcs, IcebergCrash):
    pass


class TestDeltaAzureCrash(InAzure, DeltaCrash):
    pass


class TestFilesAzureCrash(InAzure, FilesCrash):
    pass


class TestIcebergAzureCrash(InAzure, IcebergCrash):
    pass
