"""Addresses."""

import pytest

from towers.cluster.ports import split_address
from towers.errors import ClusterError


@pytest.mark.parametrize('address, expected', [
    ('a:1', ('a', 1)), ('10.0.0.1:65535', ('10.0.0.1', 65535)), ('[::1]:2222', ('::1', 2222))])
def test_host_and_port(address, expected):
    assert split_address(address) == expected


@pytest.mark.parametrize('address', ['a', ':1', 'a:', 'a:b', 'a:0', 'a:65536', 'a:-1', 'a:1.5', None])
def test_what_is_no_address(address):
    with pytest.raises(ClusterError, match="is no address: expected 'host:port'"):
        split_address(address)
