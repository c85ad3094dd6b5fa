"""The benchmark of stored weights: its figures of the steps of all ranks."""

from benchmarks import stored_weights


def test_figures_are_each_ranks_largest_and_the_slowest_ranks_median():
    step = dict.fromkeys(("reserved", "allocated_before", "allocated_by_layers", "received"), 1)
    ranks = [
        [step | {"allocated": size, "ms": ms} for size, ms in steps]
        for steps in ([(5, 10), (7, 20), (6, 30)], [(9, 15), (8, 18), (8, 20)])
    ]
    found = stored_weights.summary(ranks)
    assert found["allocated"] == [7, 9] and found["median_ms"] == 20
