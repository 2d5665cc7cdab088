from __future__ import annotations

import pytest

from laconic.engine import Ledger


def test_bytes_and_messages_add_up() -> None:
    ledger = Ledger()
    ledger.up(100)
    ledger.up(60)
    ledger.down(3 * 50, messages=3)
    ledger.down(7)
    assert ledger == Ledger(bytes_up=160, bytes_down=157, messages_up=2, messages_down=4)
    assert Ledger(**ledger.as_dict()) == ledger


def test_bits_per_parameter_are_eight_times_bytes_over_messages_times_parameters() -> None:
    ledger = Ledger(bytes_up=1000, messages_up=4, bytes_down=900, messages_down=9)
    assert ledger.bits_per_parameter(50) == (8 * 1000 / (4 * 50), 8 * 900 / (9 * 50))


def test_no_messages_are_no_bits() -> None:
    assert Ledger().bits_per_parameter(10) == (0.0, 0.0)
    assert Ledger(bytes_down=80, messages_down=1).bits_per_parameter(10) == pytest.approx((0.0, 64.0))
