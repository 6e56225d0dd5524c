"""The table that picks an algorithm: rows, what overrides them, and the file of tuned ones."""

import itertools
import json
import pickle

import pytest

from distrt.choice import (
    ALGORITHMS,
    DEFAULT,
    Choice,
    Layout,
    Row,
    cpu_model,
    load,
    parse_forced,
    save,
    tuning_path,
)
from distrt.errors import InvalidArgumentError

LAYOUT = Layout(4, 1, "some processor")
ROWS = (
    Row("all_reduce", 4, "one", 1024, "ring"),
    Row("all_reduce", 4, "one", None, "direct"),
    Row("gather", 4, "one", 0, "exchange"),
)


def test_rows_are_read_from_the_top():
    choice = Choice(
        [
            Row("all_reduce", 8, "one", None, "ring"),
            Row("all_reduce", 2, "one", 100, "halving_doubling"),
            Row("all_reduce", 2, "many", None, "hierarchical"),
            Row("all_reduce", 2, "one", None, "direct"),
            Row("broadcast", 2, "one", None, "ring"),
        ]
    )
    everything = ALGORITHMS["all_reduce"]
    # (bytes, ranks, nodes) -> what is chosen: each limit, and one beyond it.
    expected = {
        (100, 2, 1): "halving_doubling",
        (101, 2, 1): "direct",
        (0, 7, 1): "halving_doubling",
        (0, 8, 1): "ring",
        (1 << 30, 9, 1): "ring",
        (100, 2, 2): "hierarchical",
        (100, 9, 5): "hierarchical",
    }
    for (nbytes, ranks, nodes), name in expected.items():
        assert choice.choose("all_reduce", nbytes, ranks, nodes, everything) == name
    # What is not available is passed over.
    assert choice.choose("all_reduce", 100, 2, 1, ("ring", "direct")) == "direct"
    assert choice.choose("broadcast", 100, 2, 1, ("ring", "direct")) == "ring"
    # Where no row is left, something must be taken all the same.
    assert choice.choose("all_reduce", 100, 2, 1, ("ring",)) == "ring"
    assert choice.choose("gather", 1, 2, 1, ("exchange", "direct")) == "direct"


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_the_default_table_takes_one_of_what_is_available(verb):
    names = ALGORITHMS[verb]
    subsets = [s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n)]
    for ranks, nodes, nbytes in itertools.product((1, 2, 3, 64), (1, 2), (0, 1 << 14, 1 << 26)):
        for available in subsets:
            chosen = Choice().choose(verb, nbytes, ranks, nodes, available)
            assert chosen in available
            if nodes == 1 and "direct" in available:
                assert chosen == "direct"


@pytest.mark.parametrize(
    ("verb", "nodes", "available", "expected"),
    [
        ("all_reduce", 1, ("ring", "direct", "halving_doubling"), ((None, "direct"),)),
        (
            "all_reduce",
            1,
            ("ring", "halving_doubling"),
            ((16 << 10, "halving_doubling"), (None, "ring")),
        ),
        (
            "all_reduce",
            2,
            ("hierarchical", "ring", "halving_doubling"),
            ((64 << 10, "halving_doubling"), (None, "hierarchical")),
        ),
        (
            "all_reduce",
            8,
            ("ring", "halving_doubling"),
            ((64 << 10, "halving_doubling"), (None, "ring")),
        ),
        ("all_reduce", 8, ("ring",), ((None, "ring"),)),
        ("reduce", 1, ("ring", "direct"), ((None, "direct"),)),
        ("broadcast", 2, ("ring",), ((None, "ring"),)),
        ("gather", 1, ("direct", "exchange"), ((None, "direct"),)),
        ("all_to_all", 2, ("exchange",), ((None, "exchange"),)),
    ],
)
def test_the_default_table(verb, nodes, available, expected):
    assert Choice().ranges(verb, 8, nodes, available) == expected


def test_the_default_table_is_sound():
    for row in DEFAULT:
        assert row.algorithm in ALGORITHMS[row.verb] and row.nodes in ("one", "many")
    everything = ALGORITHMS["all_reduce"]
    assert Choice().choose("all_reduce", 64 << 10, 8, 2, everything[1:]) == "halving_doubling"
    assert Choice().choose("all_reduce", (64 << 10) + 1, 8, 2, everything[1:]) == "hierarchical"


def test_ranges_are_what_is_chosen():
    rows = [
        Row("all_reduce", 2, "one", 100, "ring"),
        Row("all_reduce", 2, "one", 200, "ring"),
        Row("all_reduce", 2, "one", 300, "halving_doubling"),
        Row("gather", 2, "one", 7, "exchange"),
    ]
    choice, both = Choice((*rows, *DEFAULT)), ("direct", "ring")
    every = (*both, "halving_doubling")
    assert choice.ranges("all_reduce", 2, 1, both) == ((200, "ring"), (None, "direct"))
    assert choice.ranges("all_reduce", 2, 1, every) == (
        (200, "ring"),
        (300, "halving_doubling"),
        (None, "direct"),
    )
    for limit, name in choice.ranges("all_reduce", 2, 1, every):
        if limit is not None:
            assert choice.choose("all_reduce", limit, 2, 1, every) == name
            assert choice.choose("all_reduce", limit + 1, 2, 1, every) != name
    assert choice.ranges("all_reduce", 1, 1, ("ring",)) == ((None, "ring"),)
    assert choice.ranges("broadcast", 2, 1, both) == ((None, "direct"),)
    forced = choice.forcing("gather=exchange")
    assert forced.ranges("gather", 2, 1, ("direct", "exchange")) == ((None, "exchange"),)
    with pytest.raises(InvalidArgumentError, match="cannot take 'ring'"):
        choice.forcing("ring").ranges("all_reduce", 2, 1, ("direct",))
    assert Choice(()).ranges("reduce", 2, 1, both) == ((None, "direct"),)


def test_what_is_forced():
    folding = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
    ring = dict.fromkeys(folding, "ring")
    assert parse_forced("ring") == ring
    assert parse_forced("halving_doubling") == {"all_reduce": "halving_doubling"}
    assert parse_forced(" all_reduce = ring , broadcast=direct,") == {
        "all_reduce": "ring",
        "broadcast": "direct",
    }
    assert parse_forced("ring,broadcast=direct") == {**ring, "broadcast": "direct"}
    for nothing in (None, "", "auto", " ", {}, "ring,auto"):
        assert parse_forced(nothing) == {}
    assert parse_forced({"gather": "exchange"}) == {"gather": "exchange"}


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        (
            "rings",
            r"'rings': unknown algorithm 'rings', expected auto, one of direct, hierarchical, ring",
        ),
        ("all_reduce=rings", r"all_reduce knows no algorithm 'rings', expected one of direct,"),
        ("all_reduc=ring", r"unknown verb 'all_reduc', expected one of all_reduce, reduce,"),
        ("gather=ring", r"gather cannot take 'ring', expected one of direct, exchange"),
        ("broadcast=halving_doubling", r"broadcast cannot take 'halving_doubling'"),
        ("=ring", r"unknown verb ''"),
        ("all_reduce=", r"all_reduce knows no algorithm ''"),
        ({"all_reduce": "exchange"}, r"all_reduce cannot take 'exchange'"),
        ({"reduce_all": "ring"}, r"unknown verb 'reduce_all'"),
    ],
)
def test_what_cannot_be_forced(forced, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Choice(DEFAULT, forced)


def test_forcing_beats_the_table_and_says_why_it_cannot():
    choice = Choice(DEFAULT, "ring")
    assert choice.choose("all_reduce", 8, 2, 1, ("direct", "ring")) == "ring"
    assert choice.choose("gather", 8, 2, 1, ("direct", "exchange")) == "direct", "no ring there"
    with pytest.raises(
        InvalidArgumentError,
        match=r"all_gather cannot take 'direct'.*needs NumPy arrays, on ranks of one host that "
        r"share memory. This call is one of 4 ranks on 2 host\(s\), where ring can be taken",
    ):
        Choice(DEFAULT, "direct").choose("all_gather", 8, 4, 2, ("ring",))
    assert Choice(DEFAULT, "direct").choose("all_gather", 8, 1, 1, ("ring",)) == "ring"
    other = choice.forcing("all_reduce=direct")
    assert other.choose("all_reduce", 8, 2, 1, ("direct", "ring")) == "direct"
    assert other.choose("broadcast", 8, 2, 1, ("direct", "ring")) == "ring"
    assert choice.choose("all_reduce", 8, 2, 1, ("direct", "ring")) == "ring", "not changed"


def test_a_choice_can_be_sent():
    choice = Choice((*ROWS, *DEFAULT), "broadcast=ring")
    sent = pickle.loads(pickle.dumps(choice))
    assert (sent.rows, sent.forced) == (choice.rows, choice.forced)
    for nbytes in (1024, 1025):
        call = "all_reduce", nbytes, 4, 1, ("direct", "ring")
        assert sent.choose(*call) == choice.choose(*call) == ("ring", "direct")[nbytes > 1024]


# ------------------------------------------------------------------ the file


def test_the_path_of_the_file(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    table = {"DISTRT_TUNING": "/x/t.json", "XDG_CONFIG_HOME": "/c"}
    assert str(tuning_path(table)) == "/x/t.json"
    assert str(tuning_path({"XDG_CONFIG_HOME": "/c"})) == "/c/distrt/tuning.json"
    for environ in ({}, {"XDG_CONFIG_HOME": ""}, {"XDG_CONFIG_HOME": "c"}, {"DISTRT_TUNING": " "}):
        assert str(tuning_path(environ)) == "/home/someone/.config/distrt/tuning.json"


def test_a_table_comes_back_for_its_own_layout_only(tmp_path):
    path = tmp_path / "new" / "folder" / "tuning.json"
    assert load(path, LAYOUT) == ()
    save(path, LAYOUT, ROWS)
    assert load(path, LAYOUT) == ROWS
    others = [LAYOUT._replace(ranks=2), LAYOUT._replace(nodes=2), LAYOUT._replace(cpu="another")]
    for other in others:
        assert load(path, other) == ()
    save(path, others[0], ROWS[1:])
    assert load(path, LAYOUT) == ROWS and load(path, others[0]) == ROWS[1:]
    save(path, LAYOUT, ROWS[:1])
    assert load(path, LAYOUT) == ROWS[:1] and load(path, others[0]) == ROWS[1:]
    assert [entry.name for entry in path.parent.iterdir()] == ["tuning.json"]


def written(tmp_path, change):
    path = tmp_path / "tuning.json"
    save(path, LAYOUT, ROWS)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c: c.update(format=2), "it is of format 2, expected 1"),
        (lambda c: c.pop("format"), "it lacks 'format'"),
        (lambda c: c.pop("tables"), "it lacks 'tables'"),
        (lambda c: c.update(tables=3), "not iterable"),
        (lambda c: c["tables"].append(3), "not subscriptable"),
        (lambda c: c["tables"][0].pop("cpu"), "it lacks 'cpu'"),
        (lambda c: c["tables"][0].update(ranks="4"), "not a layout"),
        (lambda c: c["tables"][0].update(cpu=["x"]), "not a layout"),
        (lambda c: c["tables"][0]["rows"][0].pop("verb"), "it lacks 'verb'"),
        (lambda c: c["tables"][0]["rows"][0].update(verb="reduce_all"), "not a row"),
        (lambda c: c["tables"][0]["rows"][0].update(verb=["all_reduce"]), "not a row"),
        (lambda c: c["tables"][0]["rows"][0].update(algorithm="exchange"), "not a row"),
        (lambda c: c["tables"][0]["rows"][0].update(nodes="two"), "not a row"),
        (lambda c: c["tables"][0]["rows"][0].update(ranks=0), "not a row"),
        (lambda c: c["tables"][0]["rows"][0].update(up_to_bytes=1.5), "not a row"),
        (lambda c: c["tables"][0]["rows"][0].update(up_to_bytes=True), "not a row"),
    ],
)
def test_a_broken_file_is_named(tmp_path, change, why):
    path = written(tmp_path, change)
    before = path.read_text()
    for use in (lambda: load(path, LAYOUT), lambda: save(path, LAYOUT, ROWS)):
        with pytest.raises(InvalidArgumentError, match="no table of tuned algorithms") as info:
            use()
        assert str(path) in str(info.value) and why in str(info.value)
    assert path.read_text() == before, "what tune did not write, it does not overwrite"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe\x00", b'{"format": 1}'])
def test_what_is_no_json_is_named(tmp_path, content):
    path = tmp_path / "tuning.json"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"tuning.json is no table of tuned"):
        load(path, LAYOUT)
    with pytest.raises(InvalidArgumentError, match="is no table of tuned"):
        load(tmp_path, LAYOUT)


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path):
    path = tmp_path / "tuning.json"
    save(path, LAYOUT, ROWS)
    with pytest.raises(TypeError, match="serializable"):
        save(path, LAYOUT._replace(ranks=2), [ROWS[0]._replace(algorithm=object())])
    assert load(path, LAYOUT) == ROWS
    assert [entry.name for entry in tmp_path.iterdir()] == ["tuning.json"]


def test_the_cpu_has_a_name():
    assert cpu_model() == cpu_model().strip() != ""
