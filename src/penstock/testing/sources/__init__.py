"""The laws that every source keeps: ranges that neither skip nor overlap, positions that bring one back exactly."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.errors import ConfigError, FatalError
from penstock.source import (
    ConnectorMetrics,
    HealthStatus,
    SourceCheckpoint,
    SourceConnector,
)
from penstock.testing.sources.journaled import JournaledLaws
from penstock.testing.sources.ranges import RangeLaws
from penstock.testing.sources.steps import Comparing, opened_source


class EverySource(Comparing):
    """What every source does, of whatever kind, and the fixtures that its tests may give."""

    @pytest.fixture
    def source(self) -> SourceConnector[Any]:
        """A source that is not open, with some rows to read."""
        raise NotImplementedError("give the contract a fixture `source`")

    @pytest.fixture
    def expected(self) -> Any:
        """The rows it holds: a table or a list of dicts, per stream if there are several; payloads of a message source."""
        return None

    @pytest.fixture
    def more(self) -> Callable[[], None] | None:
        """Makes more rows appear."""
        return None

    @pytest.fixture
    def told(self) -> Callable[[], int] | None:
        """How many records the outside system knows to be safe."""
        return None

    @pytest.fixture
    def wrong(self) -> SourceConnector[Any] | None:
        """A source whose settings are wrong in a way that shows when it is opened."""
        return None

    @pytest.fixture
    def invalid_checkpoint(self) -> SourceCheckpoint:
        """A checkpoint that `restore` must refuse."""
        return SourceCheckpoint(offsets={"\0": "\0"}, metadata={"\0": "\0"})

    @pytest.fixture(autouse=True)
    def _only_its_kind(self, request: pytest.FixtureRequest, source: SourceConnector[Any]) -> None:
        wanted = getattr(request.function, "kind", SourceConnector)
        if not isinstance(source, wanted):
            pytest.skip(f"not a {wanted.__name__}")

    def test_it_is_a_picklable_value_until_it_is_opened(self, source: SourceConnector[Any]) -> None:
        copy = pickle.loads(pickle.dumps(source))
        assert copy.config == source.config, "the copy has another config"

    def test_opening_and_closing_may_repeat(self, source: SourceConnector[Any]) -> None:
        source.close()
        for _ in range(2):
            source.open()
            source.close()
            source.close()

    def test_an_unknown_option_is_refused(self, source: SourceConnector[Any]) -> None:
        with pytest.raises(ValidationError):
            type(source.config).model_validate({**dict(source.config), "no_such_option": 1})

    def test_a_wrong_setting_is_a_config_error(self, wrong: SourceConnector[Any] | None) -> None:
        if wrong is None:
            pytest.skip("no fixture `wrong`")
        with pytest.raises((ConfigError, FatalError)):
            wrong.open()
        wrong.close()

    def test_it_answers_what_the_runtime_asks_of_it(self, source: SourceConnector[Any]) -> None:
        with opened_source(source) as opened:
            assert isinstance(opened.health_check(), HealthStatus)
            assert isinstance(opened.metrics(), ConnectorMetrics)
            assert opened.lag() is None or isinstance(opened.lag(), int)
            assert all(finding.what for finding in opened.check())
            assert all(config.topic for config in opened.producer_configs())
            for event in (opened.data_ready_notify(), opened.checkpoint_requested()):
                assert event is None or isinstance(event, threading.Event)


class SourceContract(EverySource, RangeLaws, JournaledLaws):
    """
    The conformance tests of a source of any kind: subclass it and give it the fixture `source`.

    More fixtures make more tests: `expected`, `more`, `told`, `wrong`.
    """
