"""Which recorded cases of tf.distribute's input are not followed, and why: every other one is."""

from __future__ import annotations

import re

from tests.data_pipeline import test_data_autoshard_recorded as autoshard
from tests.data_pipeline import test_data_from_function_recorded as functions
from tests.data_pipeline import test_data_recorded as distribute

# Patterns of ids, and the reason. docs/input.md says the same to a user.
NOT_FOLLOWED = {
    r"rebatch_n1": "TensorFlow leaves the batches alone on one replica; here it is unbatch, batch",
    r"unbatched_vector4?_n[234]": "vectors that nobody batched would be cut along their own axis",
    r"(ragged_batch|bucket|group_by_window|window_flat)_n\d": "not built",
    r"repr_\w+": "the text and class of TensorFlow's containers; here a part is an array",
    r"distribute_(inside_tf_function|inside_scope)_n\d": "a scope changes nothing",
    r"iter_inside_tf_function_n\d": "there are no tf.functions",
    r"distribute_(not_a_dataset_\w+|numpy|already_distributed)_n\d": (
        "refused with a DTypeError that says what to write, where it is an AttributeError there"
    ),
    r"files\d_\w+_(AUTO|FILE)_w\d": "fewer files than workers, where TensorFlow hangs",
    r"fnloop_files\d_\w+_FILE_w\d": "as above",
    r"from_function_after_per_replica_mode_n\d": "an option counts for its call",
    r"mwms_fromfn_unbatched_w\d": "a worker at its end would get a 0 that is no data",
    r"from_function_(not_dataset|none|exc)_n\d": "the same errors, of distrt's classes",
    r"mwms_values_from_function_w\d": "followed in tests/coordinator/test_input.py on real ranks",
    r"from_function_(len|next_past_end)_n\d": "len() is refused and the end is as everywhere",
}


def followed():
    names = {*distribute.RANGES, *distribute.FOLLOWED, *distribute.NEXTS, *distribute.LOOPS}
    names |= {*distribute.OPTIONS}
    names |= {n for n in distribute.CASES if re.match(r"shuffle_seed_|iter_protocol_", n)}
    names -= {n for n in names if distribute.base_of(n) in distribute.REFUSED and n[-1] != "1"}
    errors = {n for n, c in autoshard.FILES.items() if "error" in c["out"]["workers"][0]}
    names |= {*autoshard.RANGES, *autoshard.PIPES, *autoshard.FILES} - errors
    names |= {n for n in autoshard.CASES if n.startswith("get_next_past_end_")}
    names |= {*functions.GRID, *functions.STEPS, *functions.WORKERS}
    more = (
        r"from_function_(per_replica_mode|contexts)_|mwms_(fromfn_uneven|per_replica|input_context)"
    )
    return names | {n for n in functions.CASES if re.match(more, n)}


def test_every_case_is_followed_or_has_its_reason():
    cases = {*distribute.CASES, *autoshard.CASES, *functions.CASES}
    others = cases - followed()
    unexplained = [n for n in others if not any(re.fullmatch(p, n) for p in NOT_FOLLOWED)]
    assert unexplained == []
    assert all(any(re.fullmatch(p, n) for n in others) for p in NOT_FOLLOWED)
    assert not any(n.startswith("range") for n in others)
    total = len(distribute.CASES) + len(autoshard.CASES) + len(functions.CASES)
    assert len(others) < 0.05 * total, (len(others), total)
