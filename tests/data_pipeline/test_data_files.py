"""Text lines, TFRecords and lists of files: contents, damage, own rows, order."""

from __future__ import annotations

import gzip
import os
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest

from distrt.data import (
    AutoShardPolicy,
    Dataset,
    DistributedDataset,
    Options,
    TextLineDataset,
    TFRecordDataset,
    TFRecordWriter,
)
from distrt.data import files as files_of
from distrt.data.lines import TextLines
from distrt.errors import DataLossError, DTypeError, InvalidArgumentError, NotFoundError

RECORDS = [b"", b"a", b"trailing zeros\0\0", b"\0", bytes(range(256)) * 5, b"last"]


def write(path, records, options=None):
    with TFRecordWriter(path, options) as writer:
        for record in records:
            writer.write(record)
    return path


def values(dataset):
    return list(dataset.as_numpy_iterator())


# ------------------------------------------------------------------------- lines


@pytest.mark.parametrize("scan", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"one", [b"one"]),
        (b"one\ntwo\n", [b"one", b"two"]),
        (b"one\r\ntwo", [b"one", b"two"]),
        (b"\n\na\rb\n\x00\xff", [b"", b"", b"a\rb", b"\x00\xff"]),
    ],
)
@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_lines(tmp_path, content, lines, scan, compression):
    path = tmp_path / "text"
    squeeze = {"": bytes, "GZIP": gzip.compress, "ZLIB": zlib.compress}[compression]
    path.write_bytes(squeeze(content))
    assert values(TextLineDataset(path, compression, buffer_size=scan)) == lines


def test_lines_of_several_files_in_batches(tmp_path):
    paths = []
    for number, count in enumerate((3, 0, 2)):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_bytes(b"".join(b"%d.%d\n" % (number, i) for i in range(count)))
    dataset = TextLineDataset(paths)
    batches = list(dataset.batch(2))
    assert [batch.tolist() for batch in batches] == [[b"0.0", b"0.1"], [b"0.2", b"2.0"], [b"2.1"]]
    assert all(batch.dtype == object for batch in batches)
    assert dataset.element_spec.dtype == object and dataset.cardinality() == -2
    assert values(dataset.map(lambda line: float(line)).skip(3)) == [
        np.float32(2.0),
        np.float32(2.1),
    ]
    assert values(dataset.repeat(2).shuffle(99, seed=1).take(0)) == []


def test_a_header_that_is_skipped_is_no_example(tmp_path, on_ranks):
    path = tmp_path / "table.csv"
    path.write_bytes(b"x,y\n1,2\n3,4\n5,6\n")

    def parse(line):
        return np.array([int(field) for field in line.split(b",")])

    def body(ranks):
        dataset = TextLineDataset(path).skip(1).map(parse).batch(3)
        return [part.tolist() for part in DistributedDataset(dataset, ranks)]

    assert on_ranks(2, body) == [[[[1, 2], [3, 4]]], [[[5, 6]]]]


# ----------------------------------------------------------------------- records


@pytest.mark.parametrize("compression", [None, "", "GZIP", "ZLIB"])
def test_records_survive_to_the_byte(tmp_path, compression):
    path = write(tmp_path / "r", RECORDS, compression)
    dataset = TFRecordDataset(path, compression)
    assert values(dataset) == RECORDS
    assert [row for batch in dataset.batch(4) for row in batch.tolist()] == RECORDS
    assert values(dataset.map(lambda record: len(record))) == [len(r) for r in RECORDS]
    assert values(dataset.cache().batch(4).unbatch()) == RECORDS
    assert values(dataset.filter(lambda record: len(record) > 4).map(bytes.upper)) == [
        r.upper() for r in RECORDS if len(r) > 4
    ]


def test_the_frame_is_tensorflows(tmp_path):
    # The record b"abc" as TensorFlow frames it: masked CRC-32C of length and data.
    path = write(tmp_path / "r", [b"123456789"])
    raw = path.read_bytes()
    crc = 0xE3069283  # CRC-32C of "123456789", the check value of RFC 3720's polynomial
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    assert raw[:8] == struct.pack("<Q", 9) and raw[12:21] == b"123456789"
    assert raw[21:] == struct.pack("<I", masked)


# What tests/data/records*.tfrecord hold, written by TensorFlow.
RECORDED = [b"", b"a", b"a\0b\0\0", bytes(range(256)) * 3, b"\xff" * 17]


@pytest.mark.parametrize(
    ("name", "compression"),
    [("records", None), ("records_gzip", "GZIP"), ("records_zlib", "ZLIB")],
)
def test_what_tensorflow_wrote_is_read_and_written_alike(tmp_path, name, compression):
    path = Path(__file__).parents[1] / "data" / f"{name}.tfrecord"
    assert values(TFRecordDataset(path, compression)) == RECORDED
    if compression is None:
        assert write(tmp_path / "r", RECORDED).read_bytes() == path.read_bytes()


def offsets():
    at = [0]
    for record in RECORDS:
        at.append(at[-1] + 16 + len(record))
    return at


@pytest.mark.parametrize("compression", [None, "GZIP"])
@pytest.mark.parametrize("record", [0, 2, 5])
@pytest.mark.parametrize("where", ["length", "length checksum", "data", "data checksum"])
def test_a_damaged_record_is_named(tmp_path, record, where, compression):
    path = write(tmp_path / "r", RECORDS)
    start = offsets()[record]
    place = {"length": 0, "length checksum": 8, "data": 12, "data checksum": 12}[where]
    if where == "data checksum":
        place += len(RECORDS[record])
    raw = bytearray(path.read_bytes())
    raw[start + place] ^= 1
    path.write_bytes(gzip.compress(raw) if compression else raw)
    text = "length" if where.startswith("length") else "data"
    pattern = rf"r'.* record at offset {start} is damaged: the checksum of its {text} is"
    with pytest.raises(DataLossError, match=pattern):
        values(TFRecordDataset(path, compression))


@pytest.mark.parametrize("compression", [None, "ZLIB"])
@pytest.mark.parametrize("missing", [1, 4, 5, 8, 12, 19])
def test_a_file_cut_short_is_named(tmp_path, missing, compression):
    path = write(tmp_path / "r", RECORDS)
    raw = path.read_bytes()[:-missing]
    path.write_bytes(zlib.compress(raw) if compression else raw)
    with pytest.raises(DataLossError, match=rf"cut short.*offset {offsets()[-2]} needs .*, got"):
        values(TFRecordDataset(path, compression))


def test_a_compressed_file_cut_short_is_named(tmp_path):
    path = write(tmp_path / "r", [os.urandom(1000)], "GZIP")
    raw = path.read_bytes()
    path.write_bytes(raw[:-100])
    with pytest.raises(DataLossError, match="damaged or cut short"):
        values(TFRecordDataset(path, "GZIP"))
    with pytest.raises(DataLossError):
        values(TFRecordDataset(path))


def test_what_cannot_be_read_is_refused(tmp_path):
    missing = str(tmp_path / "missing")
    for dataset in (
        TextLineDataset(missing),
        TFRecordDataset([missing]),
        TextLineDataset(missing, "GZIP"),
    ):
        with pytest.raises(NotFoundError, match=r"missing' does not exist on this rank"):
            values(dataset)
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        values(TextLineDataset(tmp_path))
    with pytest.raises(InvalidArgumentError, match="compression_type"):
        TextLineDataset(missing, "BZIP2")
    with pytest.raises(DTypeError, match="file name"):
        TFRecordDataset(7)
    with (
        pytest.raises(DTypeError, match="expected bytes, got str"),
        TFRecordWriter(missing) as writer,
    ):
        writer.write("text")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_rank_reads_only_its_own_records(tmp_path, size, on_ranks):
    """The data of another rank's record is damaged: this rank never looks at it."""
    records = [b"record %d" % i for i in range(13)]
    path = write(tmp_path / "r", records)
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"record 7")] ^= 1
    path.write_bytes(raw)

    def body(ranks):
        dataset = TFRecordDataset(path).batch(13)
        try:
            (part,) = DistributedDataset(dataset, ranks)
        except DataLossError as error:
            return str(error)
        return part.tolist()

    chunk = -(-13 // size)
    for rank, seen in enumerate(on_ranks(size, body)):
        own = records[rank * chunk : (rank + 1) * chunk]
        # The owner fails, and as this is found one step ahead, all ranks do, by the same text.
        assert isinstance(seen, str) and "offset 168" in seen, (rank, own)
        assert ("the input pipeline failed" in seen) == (b"record 7" not in own)


def test_a_rank_reads_and_maps_only_its_own_rows(tmp_path, on_ranks, monkeypatch):
    path = write(tmp_path / "r", [b"%d" % i for i in range(12)])
    read = []

    def reading(self, handle):
        read.append(handle[1])
        return fetch(self, handle)

    from distrt.data.tfrecord import TFRecords

    fetch = TFRecords.fetch
    monkeypatch.setattr(TFRecords, "fetch", reading)

    def body(ranks):
        dataset = TFRecordDataset(path).map(lambda record: np.int64(int(record))).batch(4)
        distributed = DistributedDataset(dataset, ranks)
        ranks.communicator.barrier()
        read.clear()
        ranks.communicator.barrier()
        return [part.tolist() for part in distributed]

    assert on_ranks(2, body) == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [10, 11]],
    ]
    assert sorted(read) == sorted(set(read)) and len(read) == 12


def test_a_file_written_anew_is_read_anew(tmp_path):
    path = tmp_path / "r"
    assert values(TFRecordDataset(write(path, [b"old"]))) == [b"old"]
    os.unlink(path)
    assert values(TFRecordDataset(write(path, [b"newer"]))) == [b"newer"]


def test_few_files_stay_open(tmp_path):
    paths = []
    for number in range(3 * files_of._OPEN_FILES):
        paths.append(tmp_path / f"{number:03}.txt")
        paths[-1].write_bytes(b"x\n")
    before = len(os.listdir("/proc/self/fd"))
    assert values(TextLineDataset(paths)) == [b"x"] * len(paths)
    assert len(os.listdir("/proc/self/fd")) - before <= files_of._OPEN_FILES + 1


# ------------------------------------------------------------------ lists of files


def test_list_files(tmp_path):
    for name in ("b.txt", "a.txt", "c.csv", "d.txt"):
        (tmp_path / name).write_bytes(name.encode())
    texts = [str(tmp_path / name) for name in ("a.txt", "b.txt", "d.txt")]
    listed = Dataset.list_files(str(tmp_path / "*.txt"), shuffle=False)
    assert values(listed) == texts and len(listed) == 3
    assert [batch.tolist() for batch in listed.batch(2)] == [texts[:2], texts[2:]]
    both = Dataset.list_files([str(tmp_path / "*.csv"), str(tmp_path / "a*")], shuffle=False)
    assert values(both) == [texts[0], str(tmp_path / "c.csv")]
    shuffled = Dataset.list_files(str(tmp_path / "*"), seed=3)
    orders = [values(shuffled) for _ in range(6)]
    assert len({tuple(order) for order in orders}) > 1
    assert all(sorted(order) == sorted([*texts, str(tmp_path / "c.csv")]) for order in orders)
    lines = listed.interleave(TextLineDataset)
    assert values(lines) == [b"a.txt", b"b.txt", b"d.txt"]
    with pytest.raises(InvalidArgumentError, match=r"no file matches .*\*.png"):
        Dataset.list_files(str(tmp_path / "*.png"))


def make_files(folder, counts):
    folder.mkdir(exist_ok=True)
    for number, count in enumerate(counts):
        write(folder / f"{number}.tfrecord", [b"%d" % (100 * number + i) for i in range(count)])
    return [str(folder / f"{number}.tfrecord") for number in range(len(counts))]


def numbers(paths):
    return TFRecordDataset(paths).map(lambda record: np.int64(int(record))).batch(4)


def test_files_in_other_orders_are_sorted_and_other_files_refused(tmp_path, on_ranks):
    paths = make_files(tmp_path / "f", [3, 2, 4])

    def shuffled(ranks):
        order = paths if ranks.rank == 0 else paths[::-1]
        return [part.tolist() for part in DistributedDataset(numbers(order), ranks)]

    with pytest.warns(UserWarning, match="different orders"):
        seen = on_ranks(2, shuffled)
    assert seen == [[[0, 1], [101, 200], [203]], [[2, 100], [201, 202], []]]

    def others(ranks):
        own = paths if ranks.rank == 0 else [*paths[:2], write(tmp_path / "other", [b"1"])]
        with pytest.raises(InvalidArgumentError, match=r"(?s)other files.*2.tfrecord.*other"):
            DistributedDataset(numbers(own), ranks)
        return True

    assert on_ranks(2, others) == [True, True]


def test_folders_may_differ_between_hosts(tmp_path, on_ranks):
    for rank in range(2):
        make_files(tmp_path / f"host{rank}", [3, 2])

    def body(ranks):
        folder = tmp_path / f"host{ranks.rank}"
        paths = [folder / "0.tfrecord", folder / "1.tfrecord"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return [part.tolist() for part in DistributedDataset(numbers(paths), ranks)]

    assert on_ranks(2, body) == [[[0, 1], [101]], [[2, 100], []]]


def by_file(dataset):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.FILE
    return dataset.with_options(options)


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_pass_by_file_goes_on_on_other_ranks(tmp_path, before, after, step, on_ranks):
    paths = make_files(tmp_path / "f", [5, 1, 7, 3])
    rows = sorted(100 * f + i for f, count in enumerate([5, 1, 7, 3]) for i in range(count))

    def start(ranks):
        distributed = DistributedDataset(by_file(numbers(paths)), ranks, workers=True)
        iterator = iter(distributed)
        taken = [next(iterator).tolist() for _ in range(step)]
        return iterator.get_state(), taken

    def go_on(ranks):
        distributed = DistributedDataset(by_file(numbers(paths)), ranks, workers=True)
        iterator = iter(distributed)
        iterator.set_state(state)
        rest = [part.tolist() for part in iterator]
        return rest, [part.tolist() for part in distributed]

    started = on_ranks(before, start)
    state = started[0][0]
    resumed = on_ranks(after, go_on)
    seen = [row for _, taken in started for part in taken for row in part]
    seen += [row for rest, _ in resumed for part in rest for row in part]
    assert sorted(seen) == rows
    assert len({len(rest) for rest, _ in resumed}) == 1
    assert sorted(row for _, steps in resumed for part in steps for row in part) == rows


def test_hosts_may_hold_their_own_files_only(tmp_path, on_ranks):
    """Under FILE a rank opens no other file than its own."""
    make_files(tmp_path / "f", [3, 2])
    names = ["0.tfrecord", "1.tfrecord"]
    for rank in range(2):
        (tmp_path / f"host{rank}").mkdir()
        os.rename(tmp_path / "f" / names[rank], tmp_path / f"host{rank}" / names[rank])

    def body(ranks):
        paths = [tmp_path / f"host{ranks.rank}" / name for name in names]
        distributed = DistributedDataset(by_file(numbers(paths)), ranks, workers=True)
        return [part.tolist() for part in distributed]

    assert on_ranks(2, body) == [[[0, 1], [2]], [[100, 101], []]]


def test_a_scan_keeps_lines_that_span_its_blocks():
    assert TextLines(("x",), scan_bytes=3).describe() == "text_lines(1 files)"
