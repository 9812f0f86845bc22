"""What all tests share: the order of the folders, and what happens when something a test needs is not here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from penstock import errors
from penstock.spark.java import java_problem
from penstock.testing import azure as azure_server
from penstock.testing import gcs as gcs_server
from penstock.testing import hive as hive_server
from penstock.testing import kafka as kafka_server
from penstock.testing import s3 as s3_servers
from penstock.testing import spark_classes
from penstock.testing.postgres import PostgresServer, binaries
from thorough import THOROUGH

TESTS = Path(__file__).parent

# Before anything starts a process that others are forked from: they would not have what is set here.
os.environ.setdefault("SPARK_SUBMIT_OPTS", spark_classes.options())
os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1")
os.environ["PENSTOCK_S3_KEY"], os.environ["PENSTOCK_S3_SECRET"] = s3_servers.KEY, s3_servers.SECRET
os.environ["PENSTOCK_AZURE_KEY"] = azure_server.KEY

# A machine that stalls for a moment makes no property wrong: by itself, Hypothesis fails an example that takes 200 ms.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

FOLDERS = ("", "schema", "connectors", "faults", "integration", "spark")
"""Tests without a JVM come first: they are the quickest to fail."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    def place(item: pytest.Item) -> int:
        parts = item.path.relative_to(TESTS).parts
        folder = parts[0] if len(parts) > 1 else ""
        return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)

    def shares_spark(item: pytest.Item) -> bool:
        return "spark" in getattr(item, "fixturenames", ())

    if not THOROUGH:
        asked = {item: _differs_from_sink_to_sink(item) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not asked[item]])
        items[:] = [item for item in items if asked[item]]
    items.sort(key=place)
    if hasattr(config, "workerinput"):
        # The longest first: what shares the session of Spark, then what starts JVMs or servers of its own.
        items.sort(key=lambda item: (-place(item), not shares_spark(item)))
        for item in items:
            # One process has the session of Spark; what shares a server or other slow fixtures stays together as well.
            group = "spark" if shares_spark(item) else item.nodeid.rpartition("::")[0]
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: object, ids: list[str]) -> None:
    """Groups that xdist does not see scatter the tests of a module, and every worker starts every server."""
    if ids and not any("@" in each for each in ids):
        pytest.exit("xdist sees no groups: install the versions of constraints.txt", returncode=3)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The names of failed tests, one a line, go to the file that `PENSTOCK_FAILED` names: `.ci/run` tries them once more."""
    listed = os.environ.get("PENSTOCK_FAILED")
    if report.failed and listed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(listed).open("a") as out:
            out.write(report.nodeid.rpartition("@")[0] or report.nodeid)
            out.write("\n")


OF_THE_LOOP = {
    "plan.before",
    "plan.after",
    "stage.begin",
    "stage.after",
    "prepare.after",
    "commit.after",
    "committed.after",
    "ack.after",
}
"""Steps at which a sink sees nothing that it does not see at another one: they test the loop, by the memory sinks."""
OF_A_NEW_TABLE = {"stage.task", "commit.before", "commit.topic", "commit.sink"}
"""Steps of the first epoch at which a table is made."""
OF_THE_FIRST_STAGE = {
    "plan.before",
    "plan.after",
    "stage.begin",
    "stage.middle",
    "stage.middle@3",
    "stage.task",
    "stage.after",
}
"""Steps that a run passes before it knows whether its sink has a second stage: the plain memory sink takes them."""


OF_A_SINK = {
    "test_commits_at_the_same_time_can_be_killed": {("commit.before",)},
    "test_a_recovery_that_is_killed_loses_and_doubles_nothing": {("commit.sink", "commit.before@2")},
    "test_a_lost_state_directory_stops_the_run_until_it_is_told_to_resume": {("commit.after",), ("commit.before@2",)},
    "test_a_second_stage_that_is_killed_again_loses_and_doubles_nothing": {
        ("apply.middle", "apply.task"),
        ("commit.topic", "commit.before@2"),
    },
    "test_a_call_that_fails_once_is_made_good": {
        *(
            ("lose_answer", method)
            for method in ("pre_commit", "apply", "commit_applied", "commit_topic", "commit_epoch")
        ),
        *(("reject", method) for method in ("commit_applied", "commit_topic", "commit_epoch")),
    },
}
"""What is asked of every sink, of tests with many cases; the memory sinks take them all."""


OF_NO_MODE = {
    "test_a_lost_state_directory_stops_the_run_until_it_is_told_to_resume",
    "test_a_lost_state_directory_can_be_started_over_with_empty_targets",
    "test_a_state_directory_that_is_lost_twice_can_be_resumed_twice",
    "test_a_zombie_of_a_lost_incarnation_is_fenced",
    "test_a_recovery_that_is_killed_loses_and_doubles_nothing",
    "test_staged_data_that_is_deleted_is_staged_again",
}
"""What depends on markers and on staging, which all modes of a sink share: its first class takes them."""


OF_A_MODE_IN_A_STORE = {
    "test_a_run_that_is_killed_loses_and_doubles_nothing",
    "test_a_run_that_is_killed_in_the_second_stage_loses_and_doubles_nothing",
    "test_a_call_that_fails_once_is_made_good",
    "test_a_zombie_that_commits_after_its_successor_is_fenced",
}
"""What a store makes different for the work of another mode: its commit, and who is first there."""


def _is_mode(item: pytest.Item) -> bool:
    """Whether the test's class is derived from one that takes all tests of the same sink."""
    made = getattr(item, "cls", None)
    return made is not None and any(base.__name__.startswith("Test") for base in made.__mro__[1:])


def _differs_from_sink_to_sink(item: pytest.Item) -> bool:
    """False for crashes whose outcome does not depend on the sink; the memory sinks go through all of them."""
    if not item.path.name.startswith("test_crash_"):
        return True
    given = item.callspec.params if hasattr(item, "callspec") else {}
    name = getattr(item, "originalname", item.name)
    if getattr(item.cls, "stored", False):
        return _differs_with_the_state(name, given)
    if item.path.name == "test_crash_memory.py" and not _is_mode(item):
        return (
            name != "test_a_run_that_is_killed_loses_and_doubles_nothing"
            or given["step"] not in OF_THE_FIRST_STAGE
            or "Apply" not in item.cls.__name__
        )
    if _is_mode(item) and name in OF_NO_MODE:
        return False
    if item.path.name in ("test_crash_s3.py", "test_crash_stores.py"):
        if not _differs_from_store_to_store(name, given):
            return False
        if _is_mode(item) and name not in OF_A_MODE_IN_A_STORE:
            return False
    if name == "test_a_run_that_is_killed_loses_and_doubles_nothing":
        step, _, nth = given["step"].partition("@")
        if nth and given["step"] != "commit.before@2":  # between two topics; later passes are of the other sink
            return False
        if given["epoch"] == 1:  # the first class of a sink takes all steps at which a table is made
            return step == "commit.before" if _is_mode(item) else step in OF_A_NEW_TABLE
        return step not in OF_THE_LOOP
    if name == "test_a_run_that_is_killed_in_the_second_stage_loses_and_doubles_nothing":
        return given["epoch"] == 2 and "@" not in given["step"]
    if name in OF_A_SINK:
        return tuple(given.values()) in OF_A_SINK[name]
    return name != "test_a_sink_that_hangs_can_be_killed"


def _differs_with_the_state(name: str, given: dict[str, Any]) -> bool:
    """Where the state is kept matters to the loop, and to who else has it."""
    if name == "test_a_run_that_is_killed_loses_and_doubles_nothing":
        return given["step"] in OF_THE_LOOP and given["epoch"] == 2
    if name == "test_a_lost_state_directory_stops_the_run_until_it_is_told_to_resume":
        return given["step"] == "commit.after"
    return "zombie" in name and "second_stage" not in name


def _differs_from_store_to_store(name: str, given: dict[str, Any]) -> bool:
    """False for crashes whose outcome depends on the sink and not on where it writes; tests on local disks have them all."""
    if name == "test_a_call_that_fails_once_is_made_good":
        return given["method"] in ("commit_topic", "commit_applied") and given["kind"] == "lose_answer"
    if name == "test_a_run_that_is_killed_loses_and_doubles_nothing":
        return given["epoch"] == 2 and given["step"] in ("stage.task", "commit.before", "commit.topic")
    if name == "test_a_run_that_is_killed_in_the_second_stage_loses_and_doubles_nothing":
        return given["epoch"] == 2 and given["step"] == "apply.after"
    if name == "test_staged_data_that_is_deleted_is_staged_again":
        return given["step"] == "prepare.after"
    return name in (
        "test_commits_at_the_same_time_can_be_killed",
        "test_a_zombie_that_commits_after_its_successor_is_fenced",
        "test_a_task_that_outlives_its_driver_adds_nothing",
    )


def missing(what: str) -> None:
    """Something a test needs is not here: a reason to skip, and under `CI=true` to fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}, and CI=true allows no skips", pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def need() -> Callable[[bool, str], None]:
    """`need(shutil.which("mosquitto"), "mosquitto is not installed")`."""

    def need(there: object, what: str) -> None:
        if not there:
            missing(what)

    return need


@pytest.fixture(autouse=True)
def _secrets_of_its_own() -> Iterator[None]:
    """A password such as `wrong`, which one test has revealed, would be blotted out of the messages of all later ones."""
    yield
    errors._secrets.clear()


@pytest.fixture(scope="session", autouse=True)
def _open_to_servers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """pytest's own directories are closed to the user that a server runs as."""
    base = tmp_path_factory.getbasetemp()
    for path in (base, *base.parents):
        if path.stat().st_uid == os.getuid() and path.name.startswith(("pytest-", "popen-")):
            path.chmod(0o755)


@pytest.fixture(scope="session")
def java() -> None:
    problem = java_problem()
    if problem:
        missing(str(problem))


@pytest.fixture(scope="session")
def server(need: Callable[[object, str], None]) -> Iterator[PostgresServer]:
    """PostgreSQL 18, one per worker, for tests that neither restart it nor set it up in another way."""
    need(binaries(18), "PostgreSQL 18 is not installed")
    with PostgresServer(18, settings={"fsync": "off"}) as running:
        yield running


@pytest.fixture(scope="session")
def kafka_installed(java: None, need: Callable[[object, str], None]) -> None:
    need(kafka_server.is_installed(), "Kafka is not installed: make servers")


@pytest.fixture(scope="session")
def kafka(kafka_installed: None) -> Iterator[kafka_server.KafkaServer]:
    """A broker, one per worker, for tests that neither restart it nor set it up in another way."""
    with kafka_server.KafkaServer() as running:
        yield running


@pytest.fixture(scope="session")
def s3(need: Callable[[object, str], None]) -> Iterator[s3_servers.S3Server]:
    """An S3 server in memory, one per worker; each test makes buckets of its own."""
    need(s3_servers.ministack().is_file(), "ministack is not installed: make servers")
    with s3_servers.S3Server() as running:
        yield running


@pytest.fixture(scope="session")
def strict_s3(need: Callable[[object, str], None], java: None) -> Iterator[s3_servers.S3ProxyServer]:
    """An S3 server that checks signatures."""
    need(s3_servers.s3proxy().is_file(), "S3Proxy is not installed: make servers")
    with s3_servers.S3ProxyServer() as running:
        yield running


@pytest.fixture(scope="session")
def gcs(s3: s3_servers.S3Server) -> Iterator[gcs_server.GcsServer]:
    """The same S3 server, for clients of GCS."""
    with gcs_server.GcsServer(s3.port) as running:
        yield running


@pytest.fixture(scope="session")
def azure(need: Callable[[object, str], None]) -> Iterator[azure_server.AzureServer]:
    """The emulator of Azure's blob storage."""
    need(azure_server.is_installed(), "Azurite is not installed: python -m penstock.testing.azure")
    with azure_server.AzureServer() as running:
        yield running


@pytest.fixture(scope="session")
def hive(need: Callable[[object, str], None]) -> Iterator[hive_server.HiveServer]:
    """A Hive metastore."""
    need(hive_server.is_installed(), "Hive's metastore is not installed: python -m penstock.testing.hive")
    with hive_server.HiveServer() as running:
        yield running


@pytest.fixture
def own_modules() -> Iterator[None]:
    """For tests that write modules beside a pipeline: those of the same name from elsewhere step aside."""
    names = ("jsonl_dir", "shaping", "moving_source", "sampled_exchange", "mute")
    aside = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(aside)
