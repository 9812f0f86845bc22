"""
Mirror the shop of `shop.py` into an S3 server, by `lake.toml`: into Delta tables by deletion vectors and into Iceberg tables by
position deletes. At the end polars reads both, and every row is compared.

All servers are this script's own and go with it. SHOP_ROWS says how large the shop is, all tables together.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars
import proof
import psycopg
import shop
from pyiceberg.catalog.sql import SqlCatalog
from rich.console import Console

from penstock import store
from penstock.cli import guarded, running
from penstock.errors import FatalError
from penstock.pipeline import Pipeline
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
        home = proof.start_fresh(pipeline)
        home.mkdir(parents=True, exist_ok=True)
        options = pipeline.sinks["delta"].config.storage_options
        console.print(f"starting PostgreSQL 18, with a shop of {shop.ROWS:,} rows, and S3", style="dim")
        database = resources.enter_context(PostgresServer(18, settings={"autovacuum": "off"}))
        os.environ["PGPORT"] = str(database.port)
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            connection.execute(shop.SHOP)
        log = store.at("s3://lake/delta/customers/_delta_log/00000000000000000001.json", options)
        trade = shop.Trade(database.dsn, log.exists)
        resources.callback(trade.close)
        trade.thread.start()
        status = running.run(pipeline, drain=trade.closed, stop=trade.stop, closing_line=False).status()
        if trade.error is not None:
            raise trade.error
        if trade.stop.is_set():
            raise FatalError("stopped before the shop had closed and the mirror had all of it", hint="start it again")
        readers = {"delta": by_delta(server), "iceberg": by_iceberg(server, home / "catalog.db")}
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            compared = {
                f"{kind}/{name}": shop.Compared.of(connection, name, rows_of(scan(name)))
                for kind, scan in readers.items()
                for name in shop.TABLES
            }
        objects = Counter(kind_of(entry.place.name) for entry in store.listed(store.at("s3://lake", options)))
    shop.show(compared, "polars")
    console.print(
        f"\n{status['rows']['in']:,} rows in {status['epochs']:,} epochs; {objects.total():,} objects, "
        f"{objects['vectors']} of them deletion vectors, {objects['deletes']} position deletes",
        soft_wrap=True,
    )
    proof.verdict(sum(each.lost for each in compared.values()), sum(each.doubled for each in compared.values()))


def by_delta(server: s3.S3Server) -> Callable[[str], polars.LazyFrame]:
    return lambda name: polars.scan_delta(f"s3://lake/delta/{name}", storage_options=keys(server))


def by_iceberg(server: s3.S3Server, database: Path) -> Callable[[str], polars.LazyFrame]:
    os.environ["POLARS_ICEBERG_PLANNER"] = "pyiceberg"  # its own planner is another package
    own = {"s3.endpoint": server.endpoint, "s3.access-key-id": s3.KEY, "s3.secret-access-key": s3.SECRET}
    catalog = SqlCatalog("default", uri=f"sqlite:///{database}", **own, **{"s3.region": "us-east-1"})
    return lambda name: polars.scan_iceberg(
        catalog.load_table(f"shop.{name}"), reader_override="native", storage_options=keys(server)
    )


def keys(server: s3.S3Server) -> Mapping[str, str]:
    return {
        "aws_endpoint_url": server.endpoint,
        "aws_access_key_id": s3.KEY,
        "aws_secret_access_key": s3.SECRET,
        "aws_region": "us-east-1",
        "allow_http": "true",
    }


def rows_of(frame: polars.LazyFrame) -> Callable[[Sequence[str]], list[str]]:
    return lambda columns: shop.lines(frame.select(columns).collect().to_arrow(), columns)


def kind_of(name: str) -> str:
    if name.startswith("deletion_vector_"):
        return "vectors"
    return "deletes" if "-deletes-" in name else "others"


if __name__ == "__main__":
    guarded(main, debug="--debug" in sys.argv)
