"""`penstock schemas`: what a registry holds, whether the schema files fit it, and registering them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.groups import File, FileFirst, file_and_names
from penstock.cli.terminal import json_text, listing, visible
from penstock.errors import ConfigError, ConnectorError
from penstock.formats import WireSchema
from penstock.pipeline.schemas import TopicSchemas, read_schema_file
from penstock.schema.compatibility import Compatibility
from penstock.schema.inference import infer_json_schema
from penstock.schema.registry import Registry
from penstock.schema.registry.versions import Minimum, Pinned, VersionStrategy, choose, ensure_registered, review


@dataclass(frozen=True)
class SchemaFile:
    """One `[[schemas]]` entry as far as the registry is concerned."""

    subject: str
    type: str
    """`avro`, `json_schema` or `protobuf`."""
    file: Path | None = None
    """None: whatever the registry has."""
    auto_register: bool = True
    strategy: VersionStrategy | None = None
    """None: the version that the file is, else the latest."""
    compatibility: Compatibility | None = None

    def read(self) -> WireSchema:
        """The schema in the file."""
        assert self.file is not None
        return read_schema_file(self.file, self.type, self.subject)


def entries_of(schemas: TopicSchemas) -> list[SchemaFile]:
    """The entries of a pipeline file that a registry holds, or should. One without a file may get that of another entry."""
    files = {each.subject: each.entry.schema_file for each in schemas.entries if each.entry.schema_file is not None}
    return [
        SchemaFile(
            str(each.subject),
            each.entry.schema_type,
            each.entry.schema_file or (files.get(each.subject) if each.entry.version_strategy == "latest" else None),
            each.entry.auto_register,
            None if each.uses_file else each.entry.version_strategy,
            each.entry.compatibility,
        )
        for each in schemas.entries
        if each.subject is not None
    ]


Load = Callable[[Path | None], tuple[Registry, Sequence[SchemaFile]]]
"""The registry and the entries of a pipeline file; None: the file that the environment names."""


def list_subjects(registry: Registry, console: Console, json: bool = False) -> None:
    """Every subject with its versions and what new ones must keep."""
    rows = [(name, registry.fetch_schema(name), registry.compatibility(name)) for name in registry.subjects()]
    if json:
        found = [
            {"subject": name, "type": latest.type, "version": latest.version, "id": latest.id, "compatibility": mode}
            for name, latest, mode in rows
        ]
        print(json_text(found, indent=1))
        return
    if not rows:
        console.print("the registry has no subjects")
        return
    shown = [(name, latest.type, str(latest.version), str(latest.id), mode) for name, latest, mode in rows]
    listing(console, ("subject", "type", "version", "id", "compatibility"), shown)


def show_subject(registry: Registry, subject: str, version: int | None, console: Console) -> None:
    """The text of one version, as it is; on a terminal with its numbers before it."""
    found = registry.fetch_schema(subject, version)
    if console.is_terminal:
        console.print(Text(f"{subject} version {found.version}, id {found.id}, {found.type}", style="dim"))
    print(visible(found.text))


def check_files(registry: Registry, entries: Sequence[SchemaFile], console: Console) -> bool:
    """Whether a run could start with these files; registers nothing."""
    return _each(entries, console, lambda entry: checked(registry, entry))


def register_files(registry: Registry, entries: Sequence[SchemaFile], console: Console) -> bool:
    """Register every file that changed, also where `auto_register` is false: that is what the command is for."""
    return _each(entries, console, lambda entry: _registered(registry, entry))


def infer(sample: Path, console: Console) -> None:
    """A JSON Schema for the JSON values in a file, one per line."""
    try:
        lines = sample.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {sample}: {error.strerror}", code="PEN-1015") from error
    print(infer_json_schema(line for line in lines if line.strip()).text)


def make_app(
    load: Load, stdout: Callable[[], Console], runs: Callable[[Path | None], bool] = lambda file: False
) -> typer.Typer:
    """The command with its sub-commands; `load` reads the pipeline file, `runs` says if its pipeline is running."""
    app = typer.Typer(
        cls=FileFirst,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        help="Show, check and register the schemas of a pipeline's topics.",
    )

    @app.command("list")
    def _list(
        file: File = None, json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False
    ) -> None:
        """List the registry's subjects."""
        list_subjects(load(file)[0], stdout(), json)

    @app.command()
    def show(
        words: Annotated[list[str], typer.Argument(metavar="[FILE] SUBJECT", show_default=False)],
        version: Annotated[int | None, typer.Option(help="Another version than the latest.")] = None,
    ) -> None:
        """Print a subject's schema."""
        file, subject = _file_and_one(words, "SUBJECT")
        show_subject(load(file)[0], subject, version, stdout())

    @app.command()
    def check(file: File = None) -> None:
        """Say whether the schema files fit the registry; registers nothing."""
        if not check_files(*load(file), stdout()):
            raise typer.Exit(1)

    @app.command()
    def register(file: File = None) -> None:
        """Register the schema files that changed."""
        registry, entries = load(file)
        is_well = register_files(registry, entries, stdout())
        if any(each.file is not None and each.strategy is None for each in entries) and runs(file):
            stdout().print(Text("the pipeline runs: it keeps the versions that it has until it is started again"))
        if not is_well:
            raise typer.Exit(1)

    @app.command("infer")
    def _infer(words: Annotated[list[str], typer.Argument(metavar="[FILE] SAMPLE", show_default=False)]) -> None:
        """Print a JSON Schema that fits the samples in a file, one JSON value per line. Needs no pipeline."""
        infer(Path(words[-1]), stdout())

    return app


def _file_and_one(words: Sequence[str], name: str) -> tuple[Path | None, str]:
    """The pipeline file, if it is named, and the one word that follows."""
    file, names = file_and_names(words)
    if len(names) != 1:
        raise typer.BadParameter(f"name the pipeline file and one {name}", param_hint=name)
    return file, names[0]


def _each(entries: Sequence[SchemaFile], console: Console, work: Callable[[SchemaFile], str]) -> bool:
    """Do it for every entry, also after one that fails; whether all went well."""
    if not entries:
        console.print(Text("the file has no [[schemas]] that a registry holds"))
    is_well = True
    for entry in entries:
        try:
            console.print(Text.assemble(("ok ", "green"), f"{entry.subject}: {work(entry)}"), soft_wrap=True)
        except ConnectorError as error:
            is_well = False
            console.print(Text.assemble(("no ", "red"), f"{entry.subject}: {error}"), soft_wrap=True)
    return is_well


def checked(registry: Registry, entry: SchemaFile) -> str:
    """What a run would do with an entry; raises why it could not start."""
    if entry.file is None:
        found = choose(registry, entry.subject, entry.strategy or "latest")
        return f"version {found.version}, id {found.id}"
    known = review(registry, entry.subject, entry.read(), entry.auto_register, entry.compatibility)
    if known is not None:
        used = known if entry.strategy is None else choose(registry, entry.subject, entry.strategy)
        other = f"; version_strategy chooses version {used.version}" if used.version != known.version else ""
        return f"the file is version {known.version}, id {known.id}{other}"
    versions = registry.versions(entry.subject)
    _require_version(entry, versions)
    return "the file is new, and fits" if versions else "the subject is new"


def _require_version(entry: SchemaFile, versions: Sequence[int]) -> None:
    """Refuse a `version_strategy` that could not be followed once the file is the next version."""
    new = max(versions, default=0) + 1
    wanted = entry.strategy
    if isinstance(wanted, Pinned) and wanted.pinned not in {*versions, new}:
        raise ConfigError(
            f"{entry.subject!r} has no version {wanted.pinned}, and the file becomes version {new}",
            code="PEN-1031",
            hint="choose a version that there is in version_strategy",
        )
    if isinstance(wanted, Minimum) and new < wanted.minimum:
        raise ConfigError(
            f"the file becomes version {new} of {entry.subject!r}, and at least {wanted.minimum} is asked for",
            code="PEN-1031",
            hint="lower `minimum` in version_strategy",
        )


def _registered(registry: Registry, entry: SchemaFile) -> str:
    if entry.file is None:
        return checked(registry, entry)
    made = ensure_registered(registry, entry.subject, entry.read(), compatibility=entry.compatibility)
    return f"version {made.version}, id {made.id}"
