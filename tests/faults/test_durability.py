"""What survives a power cut, proved by the system calls of a whole run: nothing is promised before it is on the disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.runtime.epochs import State

EPOCHS = 2

RUN = """
import sys
from pathlib import Path
from penstock.runtime.epochs import EpochLoop, State
from penstock.pipeline.routing import Router
from penstock.testing import ForkEngine, MemorySink, MemorySinkConfig, MemorySource

path, kind = Path(sys.argv[1]), sys.argv[2]
if kind == "memory":
    sink = MemorySink(MemorySinkConfig(path=path / "sink"))
elif kind == "files":
    from penstock.connectors.files.sink import FilesSink, FilesSinkConfig
    sink = FilesSink(FilesSinkConfig(path=f"{path}/sink/{{topic}}", partition_by=("part",)))
else:
    from penstock.connectors.delta import Delta, DeltaConfig
    sink = Delta(DeltaConfig(path=f"{path}/sink/{{topic}}"))
(path / "source").mkdir()
items = [[{"id": 2 * item + row, "part": str(row)} for row in range(2)] for item in range(4)]
source = MemorySource.of(path / "source", *items)
loop = EpochLoop(State(path / "state", "durable"), {"memory": source}, {"lake": sink}, Router((), ("lake",)),
                 ForkEngine(2), max_epoch_rows=4)
loop.state.open()
sink.open()
loop.start([("lake", "/rows")])
while loop.step():
    pass
"""

CALL = re.compile(r"^(\d+) +(?:(\w+)\((.*)|<\.\.\. (\w+) resumed>(.*))$")
DESCRIPTOR, TEXT = re.compile(r"<([^<>]+)>"), re.compile(r'"([^"]*)"')


@dataclass(frozen=True)
class Call:
    name: str
    paths: tuple[str, ...]


@dataclass
class Trace:
    """The calls of a run that make, name and sync files, in the order in which they ended."""

    calls: list[Call]

    def where(self, name: str, path: str) -> list[int]:
        return [i for i, call in enumerate(self.calls) if name == call.name and call.paths and call.paths[-1] == path]

    def named(self, path: str) -> list[int]:
        """When `path` got the file that it names: by rename or link."""
        return sorted(self.where("rename", path) + self.where("link", path))

    def synced(self, path: str, after: int, before: int) -> bool:
        return any(after <= when < before for when in self.where("fsync", path))

    def made(self, path: str) -> int:
        """When `path` was created."""
        return min(self.where("openat", path), default=-1)


def read_trace(file: Path) -> Trace:
    calls, unfinished = [], {}
    for line in file.read_text(errors="replace").splitlines():
        found = CALL.match(line)
        if not found:
            continue
        pid, name, rest, resumed, tail = found.groups()
        if resumed:
            name, rest = resumed, unfinished.pop(pid, "") + tail
        elif rest.endswith("<unfinished ...>"):
            unfinished[pid] = rest.removesuffix("<unfinished ...>")
            continue
        if re.search(r"= -1 E\w+", rest):
            continue
        name = {"fdatasync": "fsync", "renameat": "rename", "renameat2": "rename", "linkat": "link"}.get(name, name)
        if name == "openat" and "O_CREAT" not in rest:
            continue
        texts = (DESCRIPTOR if name == "fsync" else TEXT).findall(rest)
        calls.append(Call(name, tuple(text for text in texts if text.startswith("/"))))
    return Trace(calls)


@pytest.fixture(scope="module", params=["memory", "files", "delta"])
def run(request, need, tmp_path_factory):
    need(shutil.which("strace"), "strace is not installed")
    path = tmp_path_factory.mktemp(request.param).resolve()
    log = path / "strace.log"
    traced = "fsync,fdatasync,rename,renameat,renameat2,link,linkat,openat"
    command = ["strace", "-f", "-y", "-s", "4096", "-e", f"trace={traced}", "-o", str(log)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [*command, sys.executable, "-c", RUN, str(path), request.param],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "Operation not permitted" in ran.stderr:
        need(False, "strace may not trace here")
    assert ran.returncode == 0, ran.stderr
    return path, read_trace(log)


def manifest(path: Path, number: int) -> str:
    return str(path / "state" / "epochs" / f"{number:012d}.json")


def test_every_manifest_is_whole_on_disk_before_it_has_its_name_and_its_name_is_synced(run):
    path, trace = run
    directory = str(path / "state" / "epochs")
    for number in range(1, EPOCHS + 1):
        renames = trace.named(manifest(path, number))
        assert len(renames) == 3, "planned, prepared, committed"
        for when, then in zip(renames, [*renames[1:], len(trace.calls)], strict=True):
            temporary = trace.calls[when].paths[0]
            assert trace.synced(temporary, trace.made(temporary), when), f"{temporary} was renamed before its fsync"
            assert trace.synced(directory, when, then), f"{directory} was not synced after manifest {number} appeared"


def test_every_file_that_a_manifest_names_is_on_disk_before_the_manifest(run):
    path, trace = run
    state = State(path / "state", "durable").peek()
    for number in range(1, EPOCHS + 1):
        _, prepared, _ = trace.named(manifest(path, number))
        names = set(file_names(state.load(number).receipts))
        assert len(names) >= 2, "each of two tasks staged a file"
        for name in names:
            made = [i for i, c in enumerate(trace.calls) if c.name == "openat" and c.paths and name in c.paths[-1]]
            staged = {
                trace.calls[i].paths[-1] for i in made if i < prepared and "/.begun/" not in trace.calls[i].paths[-1]
            }
            assert staged, f"{name} was never written"
            for file in staged:
                assert trace.synced(file, trace.made(file), prepared), f"{file} was not synced before the manifest"
                assert trace.synced(os.path.dirname(file), trace.made(file), prepared), f"nobody synced the name {file}"


def test_what_a_commit_publishes_is_on_disk_before_the_manifest_says_committed(run):
    path, trace = run
    for number in range(1, EPOCHS + 1):
        _, prepared, committed = trace.named(manifest(path, number))
        published = [
            (when, call.paths)
            for when, call in enumerate(trace.calls)
            if prepared < when < committed and call.name in ("rename", "link") and f"{path}/sink/" in call.paths[-1]
        ]
        assert published, "the commit published nothing"
        for when, (source, target) in published:
            if is_temporary(target):
                continue
            synced = trace.synced(source, 0, when) or trace.synced(target, when, committed)
            assert synced, f"{target} was not synced before the manifest said committed"
            assert trace.synced(os.path.dirname(target), when, committed), f"nobody synced the name {target}"


def test_the_source_is_told_after_the_committed_manifest_is_on_disk(run):
    path, trace = run
    acks = trace.named(str(path / "source" / "acked"))
    assert len(acks) == EPOCHS
    directory = str(path / "state" / "epochs")
    for number, ack in enumerate(acks, 1):
        _, _, committed = trace.named(manifest(path, number))
        assert trace.synced(directory, committed, ack), f"the source was told of epoch {number} too early"


def file_names(value: object) -> list[str]:
    """The names of files in a receipt, whatever its shape."""
    if isinstance(value, dict):
        return [name for each in value.values() for name in file_names(each)]
    if isinstance(value, list):
        return [name for each in value for name in file_names(each)]
    is_file = isinstance(value, str) and value.endswith((".arrow", ".parquet"))
    return [os.path.basename(str(value))] if is_file else []


def is_temporary(path: str) -> bool:
    return os.path.basename(path).startswith(".")
