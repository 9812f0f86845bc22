"""The crash suite over the delta sink."""

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import TableNotFoundError

from penstock.connectors.delta import Delta, DeltaConfig, marking
from penstock.connectors.lake import index
from penstock.testing import CrashContract


class TestDeltaCrash(CrashContract):
    mode = "append"

    def make_sink(self, path):
        return Delta(DeltaConfig(path=f"{path}/{{topic}}", mode=self.mode))

    def visible(self, path, topic):
        try:
            return DeltaTable(path / topic[1:]).to_pyarrow_table()
        except TableNotFoundError:
            return []


class AtOnce(Delta):
    """Does all work in the commit."""

    def __init__(self, config):
        super().__init__(config)
        self.needs_apply = False


class InTasks(Delta):
    """Has work for tasks in every epoch, however small it is."""

    small_rows = 0

    def plan_apply(self, epoch, topic, receipts):
        planned = super().plan_apply(epoch, topic, receipts)
        return [work.model_copy(update={"bytes": 1 << 30}) for work in planned]


class TestDeltaUpsertCrash(TestDeltaCrash):
    def make_sink(self, path):
        return AtOnce(DeltaConfig(path=f"{path}/{{topic}}", mode="upsert"))


class TestDeltaApplyCrash(TestDeltaCrash):
    commits_without_work = False

    def make_sink(self, path):
        return InTasks(DeltaConfig(path=f"{path}/{{topic}}", mode="upsert"))


class Marking(InTasks):
    """Marks rows in files of any size."""

    def open(self, *given):
        marking.MARKED_ROWS = index.STORED_ROWS = 0
        super().open(*given)


class TestDeltaVectorsCrash(TestDeltaCrash):
    commits_without_work = False

    def make_sink(self, path):
        return Marking(DeltaConfig(path=f"{path}/{{topic}}", mode="upsert", apply="vectors"))

    def visible(self, path, topic):
        try:
            return pa.table(QueryBuilder().register("t", DeltaTable(path / topic[1:])).execute("select * from t"))
        except TableNotFoundError:
            return []
