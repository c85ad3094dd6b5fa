"""A run whose newest checkpoint is damaged: refused, or on request begun from the one before."""

from tiny_run import done, losses, refused


def test_damaged_checkpoint(pretrain_here, tmp_path):
    run = ("--fp8-recipe", "fp8-tile", "--train-iters", 6, "--save", tmp_path, "--load", tmp_path,
           "--save-interval", 2, "--save-keep-last", 2)  # fmt: skip
    done(pretrain_here(*run))
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == [
        "iter_0000004",
        "iter_0000006",
    ]
    expected = losses(tmp_path)
    shard = tmp_path / "iter_0000006" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    error = refused(pretrain_here(*run))
    assert str(shard) in error
    assert "iter_0000004" in error and "--load-latest-valid" in error
    assert losses(tmp_path) == expected

    again = pretrain_here(*run, "--load-latest-valid")
    done(again)
    assert f"skipped iter_0000006: {shard}: its content differs" in again.stdout
    assert "at iteration 4" in again.stdout
    assert losses(tmp_path) == expected
    done(pretrain_here(*run))
