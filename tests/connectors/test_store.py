"""One interface over disks and object stores: the same promises, tested at both."""

from __future__ import annotations

import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import Field, TypeAdapter, ValidationError
from sink_protocol import END, ORDERS, epoch, rows, stage

from penstock import store
from penstock.config import Config, Secret
from penstock.connectors.delta import Delta, DeltaConfig
from penstock.errors import ConfigError, ConnectorError, FatalError, RetryableError
from penstock.store.objects import ObjectUpload
from penstock.store.options import for_delta
from penstock.testing.engine import Forked
from penstock.testing.processes import elsewhere
from penstock.testing.spoiler import Spoiler


class Options(Config):
    storage_options: store.StorageOptions = Field(default_factory=dict)


def options(**given):
    return Options(storage_options=given).storage_options


@pytest.fixture(params=["disk", "s3", "gcs", pytest.param("azure", marks=pytest.mark.soak)])
def root(request, tmp_path):
    if request.param == "disk":
        return store.at(str(tmp_path))
    server = request.getfixturevalue(request.param)
    given = server.options(tmp_path / "account.json") if request.param == "gcs" else server.options()
    return store.at(f"{server.bucket()}/some/where", options(**given))


def below(root, *names):
    for name in names:
        store.make_directory((root / name).parent)
        store.put(root / name, name.encode())


class TestBoth:
    def test_what_is_put_is_read_and_replaced(self, root):
        below(root, "a/b")
        assert (root / "a" / "b").read_bytes() == b"a/b"
        store.put(root / "a" / "b", b"other")
        assert (root / "a" / "b").read_text() == "other"
        assert (root / "a" / "b").exists()
        assert not (root / "a" / "c").exists()

    def test_a_missing_file_is_the_same_error_everywhere(self, root):
        with pytest.raises(FileNotFoundError):
            (root / "nothing").read_bytes()
        with pytest.raises(FileNotFoundError):
            store.copy(root / "nothing", root / "more")
        with pytest.raises(FileNotFoundError):
            store.reader(root / "nothing")
        assert store.head(root / "nothing") is None
        (root / "nothing").unlink(missing_ok=True)
        store.delete([root / "nothing", root / "nothing either"])

    def test_a_missing_file_keeps_none_of_the_others_from_being_deleted(self, root):
        below(root, *(f"t/{number}" for number in range(20)))
        store.delete([root / name for number in range(20) for name in (f"gone-{number}", f"t/{number}")])
        assert store.names(root / "t") == []

    def test_of_many_who_create_a_file_one_succeeds(self, root):
        store.make_directory(root)
        for number in range(5):
            place = root / f"entry-{number}"
            with ThreadPoolExecutor(12) as threads:
                won = list(threads.map(lambda each, place=place: store.create(place, b"%d" % each), range(12)))
            assert sum(won) == 1
            assert place.read_bytes() == b"%d" % won.index(True)

    def test_the_identity_of_a_file_changes_when_it_is_written_again(self, root):
        below(root, "a")
        first = store.head(root / "a")
        store.put(root / "a", b"b")
        second = store.head(root / "a")
        assert first.size == second.size == 1
        assert first.etag != second.etag

    def test_listings_are_deep_in_order_and_can_begin_in_the_middle(self, root):
        below(root, "t/a", "t/b/c", "t/b/d", "t/e", "tt/x")
        assert [entry.place for entry in store.listed(root / "t")] == [
            root / f"t/{n}" for n in ("a", "b/c", "b/d", "e")
        ]
        assert [entry.place.name for entry in store.listed(root / "t", "b/c")] == ["d", "e"]
        assert store.names(root / "t") == ["a", "e"]
        assert store.names(root / "nothing") == []
        assert list(store.listed(root / "nothing")) == []

    def test_many_files_are_looked_at_at_once(self, root):
        below(root, "t/a", "t/bb", "t/c/ddd")
        places = [root / name for name in ("t/bb", "t/c/ddd", "t/gone", "t/a")]
        assert [entry and entry.size for entry in store.heads(places)] == [4, 7, None, 3]
        assert store.heads([]) == []

    def test_names_with_odd_characters_are_kept(self, root):
        names = ["a b", "day=2026-01-01", "x%20y", "ü", "#~+,;@&'()", "a:b"]
        below(root, *(f"odd/{name}" for name in names))
        assert store.names(root / "odd") == sorted(names)
        for name in names:
            assert (root / "odd" / name).read_bytes() == f"odd/{name}".encode()

    def test_a_parquet_file_is_written_and_read_in_parts(self, root):
        table = pa.table({"id": range(300_000), "text": [os.urandom(16).hex() for _ in range(300_000)]})
        store.make_directory(root)
        upload = store.writer(root / "a.parquet")
        with pq.ParquetWriter(upload.file, table.schema, compression="none") as writer:
            writer.write_table(table, row_group_size=50_000)
        size = upload.finish()
        assert size > 10 << 20  # several parts
        assert store.head(root / "a.parquet").size == size
        with store.reader(root / "a.parquet") as file:
            assert pq.ParquetFile(file).read_row_groups([2, 5], columns=["id"]).column("id")[0].as_py() == 100_000
        assert pq.read_table(store.reader(root / "a.parquet")) == table

    def test_a_reader_of_an_older_version_never_gives_bytes_of_a_newer_one(self, root):
        below(root, "a")
        old = store.head(root / "a")
        store.put(root / "a", b"b")
        with pytest.raises(store.Changed):
            store.reader(root / "a", old).read()

    def test_copies_are_whole(self, root):
        below(root, "a")
        store.copy(root / "a", root / "deep" / "b")
        assert (root / "deep" / "b").read_bytes() == b"a"


class TestPlaces:
    def test_addresses_become_places(self):
        assert str(store.at("/data/lake")) == "/data/lake"
        assert str(store.at("file:///data/lake")) == "/data/lake"
        place = store.at("s3://lake/shop/") / "a" / "b"
        assert (str(place), place.name, place.key) == ("s3://lake/shop/a/b", "b", "shop/a/b")
        assert [str(each) for each in place.parents] == ["s3://lake/shop/a", "s3://lake/shop", "s3://lake/"]
        assert (store.at("s3://lake") / "a").key == "a"
        assert place.parent == store.at("s3://lake/shop/a")
        assert {place: 1}[store.at("s3://lake/shop/a/b")] == 1

    @pytest.mark.parametrize("where", ["s3://", "s3:///a", "s3://b/a//c", "s3://b/../c"])
    def test_what_is_no_address_is_refused(self, where):
        with pytest.raises(ConfigError, match="PEN-1003"):
            store.at(where)

    def test_unknown_kinds_of_stores_are_refused_with_those_that_are_known(self):
        with pytest.raises(ConfigError, match=r"(?s)PEN-1009.*s3://.*abfss://"):
            store.at("ftp://lake/shop")


class TestOptions:
    def test_a_name_that_no_store_knows_is_refused_with_the_nearest(self):
        with pytest.raises(ValidationError, match="did you mean 'region'"):
            options(regoin="eu")

    def test_names_as_other_tools_write_them_are_taken(self):
        assert options(AWS_REGION="eu", aws_endpoint="http://x") == {"region": "eu", "endpoint": "http://x"}

    @pytest.mark.parametrize("name", ["secret_access_key", "AWS_ACCESS_KEY_ID", "account_key", "sas_token"])
    def test_secrets_are_references(self, name):
        with pytest.raises(ValidationError, match="is a secret"):
            options(**{name: "plain"})

    def test_an_option_of_another_kind_of_store_is_refused(self):
        with pytest.raises(ConfigError, match=r"(?s)PEN-1002.*no option 'account_name'.*access_key_id"):
            (store.at("s3://lake/a", options(account_name="x"))).exists()

    def test_the_delta_client_gets_its_own_names(self, monkeypatch):
        monkeypatch.setenv("KEY", "k-1")
        given = for_delta("s3://lake", options(access_key_id={"env": "KEY"}, endpoint="http://127.0.0.1:1"))
        assert given["aws_access_key_id"] == "k-1"
        assert (given["aws_endpoint"], given["allow_http"]) == ("http://127.0.0.1:1", "true")

    def test_the_type_of_a_value_survives(self):
        kept = TypeAdapter(store.StorageOptions).validate_python({"allow_http": True, "access_key_id": {"env": "A"}})
        assert kept == {"allow_http": True, "access_key_id": Secret(env="A")}
        assert pickle.loads(pickle.dumps(kept)) == kept


class TestObjects:
    @pytest.fixture
    def bucket(self, s3):
        return store.at(s3.bucket(), options(**s3.options()))

    def test_a_file_that_is_given_up_never_appears(self, bucket):
        upload = store.writer(bucket / "a")
        upload.file.write(b"x" * (12 << 20))
        upload.abandon()
        assert not (bucket / "a").exists()

    def test_a_missing_bucket_is_named(self, s3):
        with pytest.raises(FatalError, match=r"PEN-5050 there is no bucket or container s3://no-such-bucket"):
            store.put(store.at("s3://no-such-bucket/a", options(**s3.options())), b"")

    def test_a_server_that_is_gone_is_worth_another_try_and_is_noticed_soon(self):
        given = options(
            endpoint="http://127.0.0.1:1",
            region="eu",
            access_key_id={"env": "PATH"},
            secret_access_key={"env": "PATH"},
            metadata_endpoint="http://127.0.0.1:1",
        )
        began = time.monotonic()
        with pytest.raises(RetryableError, match="PEN-2001"):
            store.head(store.at("s3://lake/a", given))
        assert time.monotonic() - began < 60

    def test_a_store_that_honours_conditions_passes_the_probe_and_nothing_is_left_of_it(self, bucket):
        store.refuse_without_conditions(bucket)
        assert list(store.listed(bucket)) == []

    def test_a_store_of_google_that_ignores_conditions_is_refused(self, gcs, tmp_path):
        place = store.at(gcs.bucket(), options(**gcs.options(tmp_path / "account.json")))
        store.refuse_without_conditions(place)
        gcs.spoil("PUT", "probe", "without conditions", count=2)
        with pytest.raises(ConfigError, match="PEN-1040"):
            store.refuse_without_conditions(place)

    def test_keys_over_the_limit_are_refused_before_the_store_does(self, bucket):
        with pytest.raises(FatalError, match=r"PEN-5009.*1024 bytes"):
            store.put(bucket / ("x" * 200) / ("y" * 200) / ("z" * 700), b"")

    @pytest.mark.parametrize("is_large", [False, True], ids=["one request", "parts"])
    def test_a_conflict_that_answered_a_plain_put_stopped_the_pipeline_as_unknown(self, s3, is_large):
        """S3 gives it to any request that meets another one about the same key."""

        def write(place):
            upload = store.writer(place)
            upload.file.write(b"x" * (11 << 20))
            upload.finish()

        with Spoiler(s3.port) as spoiler:
            place = store.at(f"{s3.bucket()}/a", options(**s3.options(endpoint=spoiler.endpoint)))
            spoiler.spoil("PUT", "/a", "409")
            write_it = write if is_large else lambda place: store.put(place, b"x")
            with pytest.raises(RetryableError, match="409"):
                write_it(place)
            write_it(place)
            assert place.exists()

    def test_a_process_that_was_forked_from_one_with_a_client_says_so(self, s3):
        place = f"{s3.bucket()}/a"
        with pytest.raises(FatalError, match=r"PEN-5012 this process was forked"):
            elsewhere(_use_and_fork, place, s3.options())

    def test_small_files_are_one_request_and_large_ones_are_parts(self, bucket):
        upload = store.writer(bucket / "small")
        assert isinstance(upload, ObjectUpload)
        upload.file.write(memoryview(b"abc"))
        assert not (bucket / "small").exists()
        assert upload.finish() == 3
        assert (bucket / "small").read_bytes() == b"abc"


class TestSignatures:
    """On a server that checks them."""

    def test_a_right_secret_is_taken_and_a_wrong_one_refused_without_showing_it(self, strict_s3, monkeypatch):
        bucket = strict_s3.bucket()
        right = store.at(bucket, options(**strict_s3.options()))
        store.refuse_without_conditions(right)
        monkeypatch.setenv("WRONG", "a-wrong-secret-value")
        wrong = store.at(bucket, options(**strict_s3.options(secret_access_key={"env": "WRONG"})))
        with pytest.raises(FatalError, match="PEN-5050") as caught:
            store.put(wrong / "a", b"")
        assert "a-wrong-secret-value" not in str(caught.value)

    def test_a_secret_that_was_renewed_is_read_again(self, strict_s3, tmp_path):
        file = tmp_path / "secret"
        file.write_text("an-old-secret")
        bucket = store.at(strict_s3.bucket(), options(**strict_s3.options(secret_access_key={"file": str(file)})))
        with pytest.raises(FatalError, match="PEN-5050"):
            store.put(bucket / "a", b"")
        file.write_text(os.environ["PENSTOCK_S3_SECRET"])
        with pytest.raises(RetryableError, match=r"PEN-2001.*expired"):
            store.put(bucket / "a", b"")
        store.put(bucket / "a", b"1")
        assert (bucket / "a").read_bytes() == b"1"

    def test_after_a_token_has_expired_the_secret_is_read_again(self, strict_s3, tmp_path):
        file = tmp_path / "secret"
        file.write_text(os.environ["PENSTOCK_S3_SECRET"])
        with Spoiler(strict_s3.port) as spoiler:
            given = strict_s3.options(secret_access_key={"file": str(file)}, endpoint=spoiler.endpoint)
            bucket = store.at(strict_s3.bucket(), options(**given))
            store.put(bucket / "a", b"1")
            file.write_text("another-secret")
            store.put(bucket / "a", b"2")  # nobody has complained
            spoiler.spoil("PUT", "/a", "400")
            with pytest.raises(RetryableError, match=r"PEN-2001.*expired"):
                store.put(bucket / "a", b"3")
            with pytest.raises(FatalError, match="PEN-5050"):  # by the new secret, which is wrong
                store.put(bucket / "a", b"4")

    def test_a_profile_gives_keys_and_is_read_again_once_they_are_refused(self, strict_s3, tmp_path, monkeypatch):
        file, given = tmp_path / "credentials", strict_s3.options(profile="lake")
        key = os.environ[given.pop("access_key_id")["env"]]
        secret = os.environ[given.pop("secret_access_key")["env"]]
        text = f"[lake]\naws_access_key_id = {key}\naws_secret_access_key = "
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        bucket = store.at(strict_s3.bucket(), options(**given))
        with pytest.raises(ConfigError, match=r"PEN-1004 .*'lake' holds no keys"):
            store.put(bucket / "a", b"1")
        file.write_text(f"{text}old\n")
        with pytest.raises(FatalError, match="PEN-5050"):
            store.put(bucket / "a", b"1")
        file.write_text(f"{text}{secret}\n")
        with pytest.raises(RetryableError, match="expired"):
            store.put(bucket / "a", b"1")
        store.put(bucket / "a", b"1")
        assert "profile" not in str(for_delta(str(bucket), bucket.store.options))

    def test_an_open_delta_table_takes_renewed_credentials(self, strict_s3, tmp_path):
        file = tmp_path / "secret"
        file.write_text(os.environ["PENSTOCK_S3_SECRET"])
        given = strict_s3.options(secret_access_key={"file": str(file)})
        sink = Delta(DeltaConfig(path=f"{strict_s3.bucket()}/{{topic}}", storage_options=given))
        sink.open()
        sink.commit_epoch(epoch(1), [stage(sink, epoch(1), rows(0))], END)
        file.write_text("another-secret")
        with pytest.raises(ConnectorError, match=r"PEN-5050|PEN-2001"):
            sink.target(ORDERS).load()
        file.write_text(os.environ["PENSTOCK_S3_SECRET"])
        assert sink.target(ORDERS).load().delta.version() == 1


def _use_and_fork(place, given):
    store.put(store.at(place, options(**given)), b"1")
    return Forked(lambda: store.head(store.at(place, options(**given)))).result()
