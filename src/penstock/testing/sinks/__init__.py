"""The laws that every sink keeps; each flag of its capabilities switches on the tests of what the flag promises."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from penstock.durable import canonical
from penstock.sink import (
    Receipt,
    SinkConnector,
    SinkContext,
    Task,
    TopicContext,
    WriteResult,
)
from penstock.source import ConnectorMetrics, HealthStatus
from penstock.testing.crash.stage import is_hidden
from penstock.testing.sinks.changes import ChangeLaws, EvolutionLaws
from penstock.testing.sinks.once import DurableLaws, OnceLaws
from penstock.testing.sinks.staging import SecondStageLaws, TwoPhaseLaws
from penstock.testing.sinks.steps import (
    END,
    TOPIC,
    Sink,
    Visible,
    commit,
    epoch_of,
    ids_of,
    opened_sink,
    rows,
    stage,
    visible_rows,
)


class EverySink:
    """What every sink does, whatever it promises."""

    def test_it_is_a_picklable_value_until_it_is_opened(self, sink: Sink) -> None:
        copy = pickle.loads(pickle.dumps(sink))
        assert copy.config == sink.config, "the copy has another config"

    def test_opening_and_closing_may_repeat(self, sink: Sink) -> None:
        sink.close()
        for _ in range(2):
            sink.open()
            sink.close()
            sink.close()

    def test_an_unknown_option_is_refused(self, sink: Sink) -> None:
        with pytest.raises(ValidationError):
            type(sink.config).model_validate({**dict(sink.config), "no_such_option": 1})

    def test_it_answers_what_the_runtime_asks_of_it(self, sink: Sink) -> None:
        with opened_sink(sink) as opened:
            assert isinstance(opened.health_check(), HealthStatus)
            assert isinstance(opened.metrics(), ConnectorMetrics)
            assert all(finding.what for finding in opened.check())
            assert opened.schema(TOPIC) is None or isinstance(opened.schema(TOPIC), pa.Schema)

    def test_rows_of_all_tasks_and_batches_are_visible_after_the_commit(self, sink: Sink, visible: Visible) -> None:
        epoch = epoch_of(1)
        commit(sink, epoch, [stage(sink, epoch, rows(0), rows(10), task=0), stage(sink, epoch, rows(20), task=1)])
        commit(sink, epoch_of(2), [stage(sink, epoch_of(2), rows(30))])
        assert visible_rows(visible) == rows(0, 40).to_pylist(), "what was written is not what is visible"

    def test_a_first_copy_without_rows_is_remembered_and_rows_may_follow(self, sink: Sink, visible: Visible) -> None:
        if type(sink).is_seeded is SinkConnector.is_seeded:
            pytest.skip("the sink does not remember first copies")
        with opened_sink(sink, SinkContext({TOPIC: TopicContext(source_schema=rows(0).schema)})) as opened:
            assert not opened.is_seeded(TOPIC), "nothing was copied yet"
            opened.mark_seeded(TOPIC)
        with opened_sink(sink) as opened:
            assert opened.is_seeded(TOPIC), "the copy is forgotten"
            assert opened.committed_epoch("kit", TOPIC) is None
        assert visible_rows(visible) == []
        commit(sink, epoch_of(1), [stage(sink, epoch_of(1), rows(0))])
        assert ids_of(visible) == list(range(10))

    def test_it_counts_what_it_takes(self, sink: Sink) -> None:
        epoch = epoch_of(1)
        with opened_sink(sink) as opened:
            opened.begin_epoch(epoch, Task(0))
            written = opened.write_batch(TOPIC, rows(0, 7))
            opened.flush()
            opened.pre_commit(epoch)
        assert isinstance(written, WriteResult)
        assert written.records_written == 7

    def test_receipts_survive_pickle_and_json(self, sink: Sink) -> None:
        receipt = stage(sink, epoch_of(1), rows(0), through_json=False)
        assert isinstance(receipt, sink.receipt_type), f"{receipt!r} is no {sink.receipt_type.__name__}"
        assert pickle.loads(pickle.dumps(receipt)) == receipt
        text = canonical(receipt.model_dump(mode="json"))
        assert sink.receipt_type.model_validate(json.loads(text)) == receipt, "JSON does not bring the receipt back"

    def test_a_topic_without_rows_holds_nothing(self, sink: Sink, visible: Visible) -> None:
        assert visible_rows(visible) == []
        with opened_sink(sink) as opened:
            assert opened.committed_epoch("kit", TOPIC) is None
            opened.commit_epoch(epoch_of(1), [], END)
        assert visible_rows(visible) == []


class SinkContract(EverySink, TwoPhaseLaws, SecondStageLaws, OnceLaws, DurableLaws, ChangeLaws, EvolutionLaws):
    """
    The conformance tests of a sink: subclass it and give it the fixtures `sink` and `visible`.

    `visible(topic)` reads the target by the test's own means; with no parameter it reads the one target there is.
    """

    @pytest.fixture
    def sink(self) -> Sink:
        """A sink that is not open, with an empty target."""
        raise NotImplementedError("give the contract a fixture `sink`")

    @pytest.fixture
    def visible(self) -> Visible:
        """The rows that a reader of the target sees now: an Arrow table or a list of dicts."""
        raise NotImplementedError("give the contract a fixture `visible`")

    @pytest.fixture
    def lose_staged(self, tmp_path: Path) -> Callable[[Sequence[Receipt]], None] | None:
        """Deletes what the receipts name; by default the local files. None: staged data cannot be lost on its own."""
        return lambda receipts: _delete_named(tmp_path, receipts)

    @pytest.fixture
    def partitioned_sink(self, sink: Sink) -> Sink:
        """The same sink, with rows laid out by the column `part`."""
        return type(sink)(sink.config.model_copy(update={"partition_by": ("part",)}))

    @pytest.fixture(autouse=True)
    def _only_what_it_promises(self, request: pytest.FixtureRequest, sink: Sink) -> None:
        missing = [flag for flag in getattr(request.function, "needs", ()) if not getattr(sink.capabilities, flag)]
        if missing:
            pytest.skip(f"the sink does not claim {' and '.join(missing)}")


def _delete_named(root: Path, receipts: Sequence[Receipt]) -> None:
    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, list):
            for each in value:
                yield from texts(each)
        elif isinstance(value, str) and value:
            yield value

    named = {Path(text).name for receipt in receipts for text in texts(receipt.model_dump(mode="json"))}
    found = [path for path in root.rglob("*") if path.is_file() and not is_hidden(path, root)]
    lost = [path for path in found if any(path.name.startswith(name) for name in named - {""})]
    assert lost, "no file that a receipt names was found: give the contract a fixture `lose_staged(receipts)`"
    for path in lost:
        path.unlink()
