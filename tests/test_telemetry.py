from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from penstock import web
from penstock.errors import ConfigError, FatalError, RetryableError, keep_secret
from penstock.runtime.epochs import EpochReport
from penstock.runtime.job import Bad
from penstock.runtime.telemetry import STATUS_FILE, Telemetry, Verdict, failed_tables, judge, read_status, ready
from penstock.sink import WriteResult
from penstock.source import ConnectorMetrics, HealthState, HealthStatus
from penstock.tables import TableState


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def telemetry(clock: Clock) -> Telemetry:
    return Telemetry("orders-to-lake", sources=["orders"], sinks=["lake"], health_timeout_secs=60, clock=clock)


def report(number: int, rows: int = 100, seconds: float = 0.5) -> EpochReport:
    return EpochReport(
        number=number,
        rows_in={"orders": rows},
        rows_out={("lake", "/orders"): WriteResult(rows, rows * 10)},
        seconds={"plan": 0.0, "stage": seconds},
    )


def wait_until(condition, timeout: float = 10.0) -> None:
    tick = threading.Event()
    for _ in range(int(timeout / 0.02)):
        if condition():
            return
        tick.wait(0.02)
    raise AssertionError("the condition was never met")


class TestStatus:
    def test_epochs_add_up_per_source_sink_and_topic(self, telemetry):
        telemetry.epoch(report(0))
        telemetry.epoch(report(1, rows=50))
        status = telemetry.status()
        assert status["epochs"] == 2
        assert (status["rows"]["in"], status["rows"]["out"], status["bytes"]["out"]) == (150, 150, 1500)
        assert status["sources"]["orders"]["rows"] == 150
        assert status["sinks"]["lake"]["topics"]["/orders"] == {
            "rows": 150,
            "bytes": 1500,
            "rows_per_sec": 300.0,
            "bytes_per_sec": 3000.0,
            "discarded": 0,
            "last_epoch": 1,
        }
        assert status["last_epoch"]["number"] == 1
        assert status["last_epoch"]["seconds"]["stage"] == 0.5

    def test_what_a_sink_discards_is_counted_and_logged(self, telemetry, caplog):
        lost = WriteResult(1, 10, records_discarded=3)
        for number in (7, 8):
            telemetry.epoch(EpochReport(number=number, rows_out={("lake", "/orders"): lost}))
        status = telemetry.status()
        assert (status["discarded"], status["sinks"]["lake"]["topics"]["/orders"]["discarded"]) == (6, 6)
        assert "epoch=8 discarded=3 sink=lake topic=/orders" in caplog.text
        assert 'penstock_discarded_total{connector="lake",topic="/orders"} 6.0' in telemetry.metrics().decode()

    def test_the_epoch_in_hand_and_its_phase_show_until_it_is_committed(self, telemetry, clock):
        telemetry.phase(7, "stage")
        clock.now += 3
        assert telemetry.status()["epoch"] == {"number": 7, "phase": "stage", "secs": 3}
        telemetry.epoch(report(7))
        assert telemetry.status()["epoch"] is None

    def test_a_status_is_json(self, telemetry):
        telemetry.retry("source:orders", RetryableError("refused"), 0.1)
        telemetry.lag("orders", 12)
        telemetry.state("sink:lake", HealthStatus.degraded("slow"))
        status = telemetry.status()
        assert json.loads(json.dumps(status)) == status

    def test_the_rate_counts_an_epochs_rows_over_the_time_they_took(self, telemetry, clock):
        clock.now += 10
        telemetry.epoch(report(0, rows=1000, seconds=10))
        assert telemetry.status()["rows"]["out_per_sec"] == pytest.approx(100)
        assert set(telemetry.status()["rows"]["history"][-10:]) == {100}
        clock.now += 5
        assert telemetry.status()["rows"]["out_per_sec"] == pytest.approx(50)
        assert telemetry.status()["rows"]["history"][-5:] == [0] * 5
        clock.now += 20
        assert telemetry.status()["rows"]["out_per_sec"] == 0

    def test_a_rate_before_the_first_epoch_is_zero(self, telemetry):
        assert telemetry.status()["rows"]["in_per_sec"] == 0

    def test_retries_and_errors_are_counted_by_component_and_code(self, telemetry):
        telemetry.retry("source:orders", RetryableError("refused", code="PEN-2001"), 0.1)
        telemetry.retry("source:orders", ValueError("odd"), 0.1)
        telemetry.message("error", "PEN-5009 cannot write: disk full\n  → free some space")
        status = telemetry.status()
        assert status["sources"]["orders"]["retries"] == 2
        assert status["errors_by_code"] == {"PEN-2001": 1, "PEN-5012": 1, "PEN-5009": 1}
        assert status["errors"][-1]["text"] == "cannot write: disk full"

    def test_only_the_last_errors_are_kept(self, telemetry):
        for number in range(50):
            telemetry.retry("pipeline", RetryableError(f"failure {number}"), 0.1)
        assert len(telemetry.status()["errors"]) == 10
        assert telemetry.status()["errors"][-1]["text"] == "failure 49"

    def test_the_first_end_counts(self, telemetry):
        telemetry.close(FatalError("the disk broke"))
        telemetry.close()
        assert telemetry.status()["state"] == "failed"
        assert "the disk broke" in telemetry.status()["reason"]

    def test_an_ended_pipeline_has_no_lag(self, telemetry):
        telemetry.lag("orders", 100)
        telemetry.close()
        assert telemetry.status()["sources"]["orders"]["lag"] is None

    def test_an_ended_pipeline_moves_no_rows_and_calls_nothing_healthy(self, telemetry, tmp_path):
        telemetry.publish(tmp_path)
        telemetry.state("sink:lake", HealthStatus.healthy())
        telemetry.state("source:orders", HealthStatus.degraded("a table failed"))
        telemetry.epoch(report(0))
        assert telemetry.status()["rows"]["out_per_sec"] > 0
        telemetry.close()
        for status in (telemetry.status(), read_status(tmp_path)):
            topic = status["sinks"]["lake"]["topics"]["/orders"]
            assert (status["rows"]["in_per_sec"], status["rows"]["out_per_sec"], topic["rows_per_sec"]) == (0, 0, 0)
            assert status["sources"]["orders"]["rows_per_sec"] == 0
            assert status["sinks"]["lake"]["state"] == "unknown"
            assert status["sources"]["orders"]["reason"] == "a table failed", "what was wrong stays"

    def test_an_epoch_is_one_log_line(self, telemetry, caplog):
        with caplog.at_level(logging.INFO, "penstock"):
            telemetry.phase(3, "stage")
            telemetry.epoch(report(3))
        assert [r.getMessage() for r in caplog.records] == [
            "epoch=3 rows_in=100 rows_out=100 bytes_out=1000 skipped=0 secs=0.500 plan=0.000 stage=0.500"
        ]

    def test_a_state_is_logged_when_it_changes(self, telemetry, caplog):
        with caplog.at_level(logging.INFO, "penstock"):
            for _ in range(3):
                telemetry.state("source:orders", HealthStatus.degraded("broker away"))
        assert len(caplog.records) == 1

    def test_a_state_whose_reason_counts_on_is_logged_once(self, telemetry, caplog):
        with caplog.at_level(logging.INFO, "penstock"):
            for secs in (4, 34, 64):
                telemetry.state("source:orders", HealthStatus.degraded(f"waits for pid 7, {secs} s old"))
            assert telemetry.status()["sources"]["orders"]["reason"].endswith("64 s old")
            telemetry.state("source:orders", HealthStatus.degraded("waits for a lock"))
        assert [record.getMessage() for record in caplog.records] == [
            "source:orders is degraded: waits for pid 7, 4 s old",
            "source:orders is degraded: waits for a lock",
        ]

    def test_a_failure_that_is_tried_again_is_one_log_line(self, telemetry, caplog):
        with caplog.at_level(logging.INFO):
            telemetry.retry("source:orders", RetryableError("refused", hint="wait"), 0.1)
            telemetry.state("source:orders", HealthStatus.degraded("PEN-2000 refused"))
            assert telemetry.status()["sources"]["orders"]["state"] == "degraded"
            telemetry.state("source:orders", HealthStatus.healthy())
        assert [record.getMessage() for record in caplog.records] == [
            "source:orders: PEN-2000 refused → wait; trying again in 0.1 s"
        ]
        telemetry.state("source:orders", HealthStatus.degraded("slow"))
        assert "source:orders is degraded: slow" in caplog.text, "what no retry has said is logged as ever"

    def test_the_first_bad_records_of_an_epoch_are_named_in_log_and_status(self, telemetry, caplog):
        bad = [Bad("orders", "files", "", "PEN-3001", "source", "a.jsonl, line 7: column 'v' is a str, not int64")]
        telemetry.epoch(replace(report(3), skipped=1, bad=bad))
        assert "epoch=3 bad source=orders stream=files PEN-3001: a.jsonl, line 7: column 'v' is a str" in caplog.text
        assert telemetry.status()["bad"] == [
            {
                "epoch": 3,
                "source": "orders",
                "stream": "files",
                "topic": "",
                "code": "PEN-3001",
                "reason": "a.jsonl, line 7: column 'v' is a str, not int64",
            }
        ]

    def test_threads_lose_no_count(self, telemetry):
        def work() -> None:
            for number in range(200):
                telemetry.epoch(report(number, rows=1))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert telemetry.status()["rows"]["in"] == 800


class TestHealth:
    def test_an_idle_pipeline_is_healthy_for_ever(self, telemetry, clock):
        telemetry.state("pipeline", HealthStatus.healthy())
        telemetry.epoch(report(0))
        clock.now += 100_000
        assert judge(telemetry.status()).ok

    def test_an_epoch_that_makes_no_progress_is_not_healthy(self, telemetry, clock):
        telemetry.state("pipeline", HealthStatus.healthy())
        telemetry.phase(4, "commit")
        clock.now += 49
        assert judge(telemetry.status()).ok
        clock.now += 2
        assert judge(telemetry.status()).reason == "epoch 4 made no progress for 51 s, in commit"
        assert not judge(telemetry.status()).ok

    def test_a_sign_of_life_from_a_long_phase_counts_as_progress(self, telemetry, clock):
        telemetry.state("pipeline", HealthStatus.healthy())
        for _ in range(4):
            telemetry.phase(4, "stage")
            clock.now += 30
        assert judge(telemetry.status()).ok
        assert telemetry.status()["epoch"]["secs"] == 120

    def test_a_start_that_hangs_is_not_healthy(self, telemetry, clock):
        telemetry.engine("starting Spark")
        clock.now += 61
        assert judge(telemetry.status()).reason == "starting for 61 s: starting Spark"

    def test_an_unhealthy_connector_makes_the_pipeline_unhealthy_and_is_named(self, telemetry):
        telemetry.state("pipeline", HealthStatus.healthy())
        telemetry.state("sink:lake", HealthStatus.unhealthy("bucket is gone"))
        verdict = judge(telemetry.status())
        assert (verdict.ok, verdict.reason) == (False, "sink lake is unhealthy: bucket is gone")

    def test_a_degraded_pipeline_is_alive_and_says_why(self, telemetry):
        telemetry.state("pipeline", HealthStatus.degraded("backing off"))
        verdict = judge(telemetry.status())
        assert (verdict.ok, verdict.reason) == (True, "degraded: backing off")

    def test_the_pipeline_is_as_well_as_the_worst_of_its_parts_on_every_front(self, telemetry):
        telemetry.state("pipeline", HealthStatus.healthy())
        telemetry.state("sink:lake", HealthStatus.degraded("slow"))
        status = telemetry.status()
        assert (status["state"], status["reason"]) == ("degraded", "sink lake is degraded: slow")
        assert judge(status) == Verdict(True, "degraded: sink lake is degraded: slow")
        assert 'penstock_state{component="pipeline",state="degraded"} 1.0' in telemetry.metrics().decode()

    def test_a_failed_table_shows_on_every_front(self, telemetry, caplog):
        telemetry.state("pipeline", HealthStatus.healthy())
        telemetry.state("source:orders", HealthStatus.healthy())
        broken = TableState("failed", code="PEN-4001", error="a column changed", hint="cast it")
        for _ in range(2):
            telemetry.tables("orders", {"public.a": TableState("active"), "public.b": broken})
        status = telemetry.status()
        reason = "source orders is degraded: 1 table failed: public.b (PEN-4001 a column changed)"
        assert (status["state"], status["reason"]) == ("degraded", reason)
        assert judge(status).reason == f"degraded: {reason}"
        assert list(failed_tables(status)) == ["public.b"]
        text = telemetry.metrics().decode()
        assert 'penstock_table{connector="orders",state="failed",table="public.b"} 1.0' in text
        assert 'penstock_table{connector="orders",state="active",table="public.a"} 1.0' in text
        assert caplog.text.count("table public.b failed: PEN-4001 a column changed → cast it") == 1
        telemetry.state("source:orders", HealthStatus(HealthState.HEALTHY, "slot orders: reserved"))
        assert "orders is healthy: slot orders" not in caplog.text
        assert "source:orders is degraded: 1 of its tables failed: public.b" in caplog.text
        telemetry.tables("orders", {"public.a": TableState("active"), "public.b": TableState("seeding")})
        assert telemetry.status()["state"] == "running"

    def test_ready_means_an_epoch_or_open_and_idle_sources(self, telemetry):
        assert not ready(telemetry.status()).ok
        telemetry.state("pipeline", HealthStatus.healthy())
        assert ready(telemetry.status()).ok

    def test_an_ended_pipeline_is_neither_healthy_nor_ready(self, telemetry):
        telemetry.epoch(report(0))
        telemetry.close()
        assert not judge(telemetry.status()).ok
        assert not ready(telemetry.status()).ok


class TestStatusFile:
    def test_it_appears_at_once_and_holds_the_end(self, telemetry, tmp_path):
        telemetry.publish(tmp_path)
        assert json.loads((tmp_path / STATUS_FILE).read_text())["state"] == "starting"
        telemetry.epoch(report(0))
        telemetry.close()
        assert read_status(tmp_path)["state"] == "stopped"
        assert read_status(tmp_path)["epochs"] == 1
        assert sorted(p.name for p in tmp_path.iterdir()) == ["history", STATUS_FILE]

    def test_it_follows_what_happens_at_most_once_a_second(self, telemetry, tmp_path):
        telemetry.publish(tmp_path)
        written = set()
        for number in range(100):
            telemetry.epoch(report(number))
            written.add((tmp_path / STATUS_FILE).stat().st_mtime_ns)
        assert len(written) <= 3
        wait_until(lambda: read_status(tmp_path)["epochs"] == 100)

    def test_a_run_that_fails_at_once_still_shows_the_last_epoch_of_the_run_before(self, telemetry, tmp_path):
        telemetry.publish(tmp_path)
        telemetry.epoch(report(41))
        telemetry.close()
        failing = Telemetry("orders-to-lake", sources=["orders"], sinks=["lake"])
        failing.publish(tmp_path)
        failing.close(FatalError("no Java"))
        found = read_status(tmp_path)
        assert (found["state"], found["epochs"], found["last_epoch"]["number"]) == ("failed", 0, 41)

    def test_a_directory_that_cannot_be_written_stops_nothing(self, telemetry, tmp_path):
        telemetry.publish(tmp_path / "missing")
        telemetry.epoch(report(0))
        telemetry.close()
        assert telemetry.status()["epochs"] == 1

    def test_a_pipeline_that_never_ran_has_none(self, tmp_path):
        assert read_status(tmp_path) is None

    def test_half_a_file_is_no_status(self, tmp_path):
        (tmp_path / STATUS_FILE).write_text('{"state": "runn')
        assert read_status(tmp_path) is None

    def test_a_killed_process_is_dead_and_not_running(self, tmp_path):
        code = (
            "import sys, os, signal, pathlib\n"
            "from penstock.runtime.telemetry import *; from penstock.source import HealthStatus\n"
            "t = Telemetry('x', sources=['s']); t.state('pipeline', HealthStatus.healthy())\n"
            "t.publish(pathlib.Path(sys.argv[1])); print('up', flush=True); sys.stdin.read()\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert read_status(tmp_path)["state"] == "running"
        process.kill()
        process.communicate()
        assert read_status(tmp_path)["state"] == "dead"
        assert not judge(read_status(tmp_path)).ok

    def test_another_process_with_the_same_number_is_not_taken_for_it(self, telemetry, tmp_path):
        telemetry.publish(tmp_path)
        file = tmp_path / STATUS_FILE
        file.write_text(json.dumps({**json.loads(file.read_text()), "process_started": "1"}))
        assert read_status(tmp_path)["state"] == "dead"


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class TestHttp:
    @pytest.fixture
    def url(self, telemetry):
        with web.serve(telemetry, 0):
            yield telemetry.url

    def test_metrics_carry_the_documented_names(self, telemetry, url):
        telemetry.epoch(report(0))
        telemetry.retry("source:orders", RetryableError("refused", code="PEN-2001"), 0.1)
        telemetry.lag("orders", 42, "bytes")
        _, text = get(f"{url}/metrics")
        for line in (
            'penstock_rows_total{connector="orders",direction="in",topic=""} 100.0',
            'penstock_rows_total{connector="lake",direction="out",topic="/orders"} 100.0',
            'penstock_bytes_total{connector="lake",direction="out",topic="/orders"} 1000.0',
            "penstock_epochs_total 1.0",
            'penstock_epoch_seconds_bucket{le="0.5",phase="stage"} 1.0',
            'penstock_retries_total{component="source:orders"} 1.0',
            'penstock_errors_total{code="PEN-2001"} 1.0',
            'penstock_lag{connector="orders",unit="bytes"} 42.0',
            'penstock_state{component="pipeline",state="starting"} 1.0',
            "penstock_skipped_total 0.0",
        ):
            assert line in text
        assert "penstock_last_commit_timestamp_seconds 0.0" not in text

    def test_health_answers_503_with_the_reason(self, telemetry, url):
        telemetry.state("pipeline", HealthStatus.healthy())
        assert get(f"{url}/healthz") == (200, "running\n")
        telemetry.state("source:orders", HealthStatus.unhealthy("broker away"))
        assert get(f"{url}/healthz") == (503, "source orders is unhealthy: broker away\n")

    def test_ready_answers_503_until_the_pipeline_works(self, telemetry, url):
        telemetry.engine("starting Spark")
        assert get(f"{url}/readyz") == (503, "starting: starting Spark\n")
        telemetry.epoch(report(0))
        assert get(f"{url}/readyz")[0] == 200

    def test_status_is_the_same_as_everywhere(self, telemetry, url):
        telemetry.epoch(report(0))
        assert json.loads(get(f"{url}/api/status")[1])["sinks"] == telemetry.status()["sinks"]

    def test_other_paths_say_what_there_is(self, url):
        code, text = get(f"{url}/nothing")
        assert code == 404
        assert "/metrics" in text

    def test_a_port_that_is_taken_is_a_setting_to_change(self, telemetry, url):
        with pytest.raises(ConfigError, match="metrics_port"):
            web.serve(telemetry, int(url.rpartition(":")[2]))

    def test_what_connectors_count_is_scraped_and_a_broken_one_harms_nobody(self):
        class Counting:
            def metrics(self) -> ConnectorMetrics:
                return ConnectorMetrics(records_total=5, custom={"reconnects": 2})

        class Broken:
            def metrics(self) -> ConnectorMetrics:
                raise OSError("gone")

        class Silent:
            def metrics(self) -> ConnectorMetrics:
                return ConnectorMetrics()

        telemetry = Telemetry("x", sources={"a": Counting(), "b": Broken(), "c": Silent()})
        text = telemetry.metrics().decode()
        assert 'penstock_connector{component="source:a",name="reconnects"} 2.0' in text
        assert "source:b" in text
        assert 'component="source:b",name' not in text
        assert 'component="source:c",name' not in text, "one that counts nothing has no counters"


def test_what_connectors_say_of_themselves_is_told_without_secrets(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.errors._secrets", set())
    keep_secret("planted-Walrus-5")
    caplog.set_level(logging.DEBUG, "penstock")
    said = "no entry with planted-Walrus-5"
    telemetry.state("source:orders", HealthStatus.degraded(said))
    telemetry.state("sink:lake", HealthStatus.unhealthy(said))
    telemetry.unreachable("sink:lake", said)
    telemetry.message("error", said)
    telemetry.retry("pipeline", RetryableError(said), 1.0)
    telemetry.tables("orders", {"t": TableState("failed", code="PEN-4001", error=said, hint=said)})
    told = json.dumps(telemetry.status()) + telemetry.metrics().decode() + caplog.text
    assert told.count("no entry with …") > 5
    assert "Walrus" not in told
