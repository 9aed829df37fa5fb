"""The known sum at bootstrap finds a mesh that does not add."""

from __future__ import annotations

import pytest

from ds4.collectives.tcp import TcpCollective
from ds4.errors import CollectiveError


class _Stub(TcpCollective):
    """Returns its input, as a communicator that was never connected would."""

    def join(self, part):
        return part


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_mesh_that_returns_its_input_fails_the_self_test_on_every_rank(world):
    for rank in range(world):
        with pytest.raises(CollectiveError, match=f"rank {rank}: collective self-test gave"):
            _Stub(rank, world, {}, 1.0).self_test()


def test_a_world_of_one_passes_the_self_test():
    TcpCollective(0, 1, {}, 1.0).self_test()
