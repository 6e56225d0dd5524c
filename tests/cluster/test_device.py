"""Which device a rank gets, on a table of what the drivers of all ranks show."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest

from distrt.cluster.device import Device, activate, assign, choose, parse, visible_devices
from distrt.cluster.topology import Topology
from distrt.errors import DeviceError, InvalidArgumentError

TABLE = json.loads((Path(__file__).parent.parent / "data" / "device_choice.json").read_text())
ROWS = [pytest.param(row, id=row["what"]) for row in TABLE]


def place(hosts, rank):
    return Topology.from_keys([(f"h{host}", "boot") for host in hosts], rank)


def chosen(prefer, hosts, lists):
    """Return the device of each rank and {rank: texts of its warnings}."""
    devices, said = [], {}
    for rank in range(len(hosts)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            devices.append(choose(prefer, place(hosts, rank), lists))
        if caught:
            said[rank] = [str(warning.message) for warning in caught]
    return devices, said


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("prefer", ["auto", "gpu"])
def test_recorded_rows(row, prefer):
    hosts, lists, indices = row["hosts"], row["lists"], row["indices"]
    assert assign(hosts, lists) == indices
    devices, said = chosen(prefer, hosts, lists)
    assert devices == [
        Device.gpu(index, devices_of_rank[index])
        for index, devices_of_rank in zip(indices, lists, strict=True)
    ]
    assert [device.name for device in devices] == [f"/gpu:{index}" for index in indices]
    assert list(said) == ([row["shared"][0][0]] if row["shared"] else [])
    for one, other in row["shared"]:
        assert f"ranks {one} and {other} share {devices[one].uuid}" in said[0][0]


@pytest.mark.parametrize("row", ROWS)
def test_cpu_is_cpu_for_all(row):
    devices, said = chosen("cpu", row["hosts"], row["lists"])
    assert set(devices) == {Device("cpu", 0, "")}
    assert said == {}
    assert devices[0].name == "/cpu:0"


def test_no_gpu_anywhere():
    assert chosen("auto", [0, 0, 1], [(), (), ()]) == ([Device.cpu()] * 3, {})
    for rank in range(3):
        with pytest.raises(DeviceError, match=r"ranks 0, 1 and 2 of 3 see none \(on h0, h1\)"):
            choose("gpu", place([0, 0, 1], rank), [(), (), ()])


def test_gpus_on_some_ranks_only():
    lists = [("a",), (), ("b",), ()]
    devices, said = chosen("auto", [0, 1, 2, 1], lists)
    assert devices == [Device.gpu(0, "a"), Device.cpu(), Device.gpu(0, "b"), Device.cpu()]
    assert list(said) == [1]
    assert said[1][0].startswith("ranks 1 and 3 of 4 see no GPU")
    for rank in range(4):
        with pytest.raises(DeviceError, match=r"ranks 1 and 3 of 4 see none \(on h1\).*nvidia-smi"):
            choose("gpu", place([0, 1, 2, 1], rank), lists)


def test_overlapping_lists_that_meet_on_one_gpu():
    devices, said = chosen("auto", [0, 0, 0], [("c",), ("a", "b"), ("a", "c")])
    assert [device.uuid for device in devices] == ["c", "a", "a"]
    assert list(said) == [1]
    assert said[1] == ["ranks 1 and 2 share a: slower than a GPU for each rank"]


def test_equal_uuids_of_different_hosts_are_not_shared():
    assert chosen("auto", [0, 1], [("a",), ("a",)])[1] == {}


@pytest.mark.parametrize("count", [1, 2, 8])
def test_one_rank_with_idle_gpus(monkeypatch, count):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    devices, said = chosen("auto", [0], [[f"u{i}" for i in range(count)]])
    assert devices == [Device.gpu(0, "u0")]
    text = f"1 of {count} GPUs in use; mpirun -n {count} python train.py"
    assert said == ({0: [text]} if count > 1 else {})


def test_unknown_preference():
    with pytest.raises(InvalidArgumentError, match="auto, cpu, gpu; got 'tpu'"):
        choose("tpu", place([0], 0), [()])


def test_lists_of_another_length_are_a_bug():
    with pytest.raises(ValueError, match="zip"):
        assign([0, 0], [("a",)])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/gpu:0", ("gpu", 0)),
        ("GPU:0", ("gpu", 0)),
        ("gpu:12", ("gpu", 12)),
        ("/GPU:1", ("gpu", 1)),
        ("/cpu:0", ("cpu", 0)),
        ("cpu", ("cpu", None)),
        ("GPU", ("gpu", None)),
        ("gpu:*", ("gpu", None)),
        ("/device:CPU:0", ("cpu", 0)),
        ("/job:localhost/replica:0/task:0/device:GPU:1", ("gpu", 1)),
        ("/job:worker/task:3/device:CPU:0", ("cpu", 0)),
    ],
)
def test_parse(name, expected):
    assert parse(name) == expected


@pytest.mark.parametrize(
    "name",
    ["", "tpu:0", "/gpu:", "gpu:x", "gpu:-1", "gpu0", "/gpu:0\n", "xgpu:0", "gpu:0:1", 0, None],
)
def test_parse_refuses(name):
    with pytest.raises(InvalidArgumentError, match="unknown device"):
        parse(name)


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_list_of_visible_devices_means_none(monkeypatch, value):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_devices() == ()


def test_visible_devices_are_distinct_names(monkeypatch):
    # Holds with and without GPUs, CuPy and a driver: the call never raises.
    found = visible_devices()
    assert len(set(found)) == len(found)
    assert all(name.startswith("GPU-") for name in found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    if not found:
        assert visible_devices() == ()


def test_the_cpu_needs_no_activation():
    before = "cupy" in sys.modules
    activate(Device.cpu())
    assert ("cupy" in sys.modules) is before
