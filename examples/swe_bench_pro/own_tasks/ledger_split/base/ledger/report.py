# SPDX-License-Identifier: Apache-2.0
"""Balances after a list of payments."""

from ledger.money import show
from ledger.split import shares


def balances(payments):
    """Return each person's balance.

    A payment is (payer, cents, people): the payer is owed what the others owe.
    """
    totals = {}
    for payer, cents, people in payments:
        for person, share in shares(cents, people).items():
            totals[person] = totals.get(person, 0) - share
        totals[payer] = totals.get(payer, 0) + cents
    return totals


def lines(payments):
    """Return one line a person, in the order of names."""
    return [f"{person} {show(cents)}" for person, cents in balances(payments).items()]
