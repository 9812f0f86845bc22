"""The crash suite over the delta sink."""

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from penstock.connectors.delta import Delta, DeltaConfig
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
