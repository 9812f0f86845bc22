"""
Mirror the shop of `shop.py` into an S3 server, by `lake.toml`: into Delta tables by deletion vectors and into Iceberg tables by
position deletes. At the end DuckDB reads both, and every row is compared.

All servers are this script's own and go with it. SHOP_ROWS says how large the shop is, all tables together.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

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
from penstock.testing.readers import DuckDB, install, is_installed

FILE = Path(__file__).with_name("lake.toml")


def main() -> None:
    console = Console(stderr=True, highlight=False)
    with contextlib.ExitStack() as resources:
        if not s3.ministack().is_file():
            console.print("fetching an S3 server (90 MB); only this once", style="dim")
            s3.install_ministack()
        if not is_installed():
            console.print("fetching a DuckDB that reads lakes (160 MB); only this once", style="dim")
            install()
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
        with psycopg.connect(database.dsn, autocommit=True) as connection, DuckDB() as reader:
            secret = f"type s3, key_id '{s3.KEY}', secret '{s3.SECRET}', endpoint '127.0.0.1:{server.port}'"
            reader.rows(f"create secret ({secret}, use_ssl false, url_style 'path', region 'us-east-1')")
            compared = {
                name: shop.Compared.of(connection, name.partition("/")[2], partial(lines, reader, scan))
                for name, scan in lake_tables(server, home / "catalog.db").items()
            }
        objects = Counter(kind_of(entry.place.name) for entry in store.listed(store.at("s3://lake", options)))
    shop.show(compared, "DuckDB")
    console.print(
        f"\n{status['rows']['in']:,} rows in {status['epochs']:,} epochs; {objects.total():,} objects, "
        f"{objects['vectors']} of them deletion vectors, {objects['deletes']} position deletes",
        soft_wrap=True,
    )
    proof.verdict(sum(each.lost for each in compared.values()), sum(each.doubled for each in compared.values()))


def lake_tables(server: s3.S3Server, database: Path) -> dict[str, str]:
    """Every table of the lake, as DuckDB reads it."""
    own = {"s3.endpoint": server.endpoint, "s3.access-key-id": s3.KEY, "s3.secret-access-key": s3.SECRET}
    catalog = SqlCatalog("default", uri=f"sqlite:///{database}", **own, **{"s3.region": "us-east-1"})
    newest = {name: catalog.load_table(f"shop.{name}").metadata_location for name in shop.TABLES}
    return {
        **{f"delta/{name}": f"delta_scan('s3://lake/delta/{name}')" for name in shop.TABLES},
        **{f"iceberg/{name}": f"iceberg_scan('{place}')" for name, place in newest.items()},
    }


def lines(reader: DuckDB, scan: str, columns: Sequence[tuple[str, str]]) -> list[str]:
    """Every row of a table as one text, made by DuckDB."""
    every = ", ".join(text_of(name, kind) for name, kind in columns)
    return [row["line"] for row in reader.rows(f"select concat_ws(chr(31), {every}) as line from {scan}")]


def text_of(column: str, kind: str) -> str:
    text = f'"{column}"::varchar'
    if kind == "timestamp with time zone":
        text = f"strftime(make_timestamp(epoch_us(\"{column}\")), '%Y-%m-%d %H:%M:%S.%fZ')"
    return f"coalesce({text}, '∅')"


def kind_of(name: str) -> str:
    if name.startswith("deletion_vector_"):
        return "vectors"
    return "deletes" if "-deletes-" in name else "others"


if __name__ == "__main__":
    guarded(main, debug="--debug" in sys.argv)
