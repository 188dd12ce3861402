"""Classes of ranks that behave alike, by hand."""

from __future__ import annotations

from shardwright.sim_cluster.timing.classes import refine


def test_a_slow_rank_splits_its_own_group_only() -> None:
    """Of dp = 2 x tp = 3 rank 4 is slow: its tp group 3, 4, 5 and its dp group 1, 4 see it, and
    who meets those sees that. Ranks 3 and 5, and 0 and 2, stay alike; the lowest stands for them.
    """
    mesh, axes = {"dp": 2, "tp": 3}, [("dp",), ("tp",)]
    classes = refine(mesh, axes, ["", "", "", "", "slow", ""])
    assert classes.of_rank == (0, 1, 0, 2, 3, 2)
    assert classes.count == 4
    assert [classes.representative(c) for c in range(4)] == [0, 1, 3, 4]
    assert [classes.ranks(c) for c in range(4)] == [(0, 2), (1,), (3, 5), (4,)]
    met = {axis: [sorted(group) for group in classes.groups[axis]] for axis in axes}
    assert met == {
        ("dp",): [[0, 2], [1, 3], [0, 2], [1, 3]],
        ("tp",): [[0, 1], [0, 1], [2, 3], [2, 3]],
    }
    assert classes.peer(0, 1, 3) == 2  # rank 0 + 3
    assert classes.mates(0) == ()
