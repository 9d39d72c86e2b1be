"""Primes of up to 64 bits."""

from __future__ import annotations

# These bases are exact below 3.18 * 10^23 (Sorenson, Webster 2015).
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(number: int) -> bool:
    """Return whether a number below 2^64 is prime, by the Miller-Rabin test."""
    if number < 2:
        return False
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    halvings = ((number - 1) & (1 - number)).bit_length() - 1
    odd = (number - 1) >> halvings
    return all(_is_witnessed(witness, number, odd, halvings) for witness in _WITNESSES)


def _is_witnessed(witness: int, number: int, odd: int, halvings: int) -> bool:
    power = pow(witness, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(halvings - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def prime_up_to(number: int) -> int:
    """Return the largest prime that is at most ``number``, from 2 to 2^64 - 1."""
    while not is_prime(number):
        number -= 1
    return number


__all__ = ["is_prime", "prime_up_to"]
