"""
Mirror the shop of `shop.py` into an S3 server, by `lake.toml`: upserts by deletion vectors, every row compared at the end.

Both servers are this script's own and go with it. SHOP_ROWS says how large the shop is, all tables together.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import proof
import psycopg
import shop
from rich.console import Console

from penstock import store
from penstock.cli import guarded, running
from penstock.errors import FatalError
from penstock.pipeline import Pipeline
from penstock.store.options import for_delta
from penstock.testing import s3
from penstock.testing.postgres import PostgresServer

FILE = Path(__file__).with_name("lake.toml")


def main() -> None:
    console = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as resources:
        if not s3.ministack().is_file():
            console.print("fetching an S3 server (90 MB); only this once", style="dim")
            s3.install_ministack()
        server = resources.enter_context(s3.S3Server())
        server.options()  # sets the keys
        os.environ["LAKE_ENDPOINT"] = server.endpoint
        server.bucket("lake")
        pipeline = Pipeline.from_toml(FILE)
        proof.start_fresh(pipeline)
        options = pipeline.sinks["lake"].config.storage_options
        console.print(f"starting PostgreSQL 18, with a shop of {shop.ROWS:,} rows, and S3", style="dim")
        database = resources.enter_context(PostgresServer(18, settings={"autovacuum": "off"}))
        os.environ["PGPORT"] = str(database.port)
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            connection.execute(shop.SHOP)
        log = store.at("s3://lake/shop/customers/_delta_log/00000000000000000001.json", options)
        trade = shop.Trade(database.dsn, log.exists)
        resources.callback(trade.close)
        trade.thread.start()
        status = running.run(pipeline, drain=trade.closed, stop=trade.stop, closing_line=False).status()
        if trade.error is not None:
            raise trade.error
        if trade.stop.is_set():
            raise FatalError("stopped before the shop had closed and the mirror had all of it", hint="start it again")
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            client = for_delta("s3://lake", options)
            compared = {
                name: shop.Compared.of(connection, name, f"s3://lake/shop/{name}", client) for name in shop.TABLES
            }
        objects = list(store.listed(store.at("s3://lake", options)))
    shop.show(compared)
    vectors = sum(each.place.name.startswith("deletion_vector_") for each in objects)
    console.print(
        f"\n{status['rows']['in']:,} rows in {status['epochs']:,} epochs; {len(objects):,} objects, "
        f"{vectors} of them deletion vectors",
    )
    proof.verdict(sum(each.lost for each in compared.values()), sum(each.doubled for each in compared.values()))


if __name__ == "__main__":
    guarded(main, debug="--debug" in sys.argv)
