"""The hash constants of a GGUF header, read into one form for both layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.gguf.keys import KeyValue
from pipeline.model.config import EngramConfig
from pipeline.model.engram.arithmetic import bucket_sizes, multipliers, next_prime, split_layers
from pipeline.model.engram.findings import EngramChecks
from pipeline.model.layout import Layout
from pipeline.model.metadata.required import MAINLINE_KEYS, NINE_KEYS, KeyType

_P = "deepseek41."

_NAMES: Mapping[Layout, Mapping[str, str]] = {
    Layout.FORK: {
        "layers": f"{_P}engram.layer_ids",
        "max_ngram": f"{_P}engram.max_ngram_size",
        "n_heads": f"{_P}engram.head_count",
        "head_dim": f"{_P}engram.key_length",
        "sizes": f"{_P}engram.primes",
        "offsets": f"{_P}engram.offsets",
        "factors": f"{_P}engram.multipliers",
    },
    Layout.MAINLINE: {
        "layers": f"{_P}ple.layers",
        "max_ngram": f"{_P}ple.ngram_size",
        "n_heads": f"{_P}ple.heads_per_ngram",
        "head_dim": f"{_P}embedding_length_per_layer_input",
        "sizes": f"{_P}ple.head_vocab_sizes",
        "offsets": f"{_P}ple.head_offsets",
        "factors": f"{_P}ple.layer_multipliers",
    },
}
_CONTRACTS: Mapping[Layout, Mapping[str, KeyType]] = {
    Layout.FORK: NINE_KEYS,
    Layout.MAINLINE: MAINLINE_KEYS,
}
_CAUSES = {
    f"{_P}attention.indexer.candidate_source_layer": "Without it, as a signed number, the engine "
    "runs with the candidate mask silently off.",
    f"{_P}engram.pad_token_id": "The loader takes an unsigned number only.",
}


@dataclass(frozen=True, slots=True)
class EngramFacts:
    """Hash constants as stored; lists run over all engram layers."""

    layers: tuple[int, ...]
    max_ngram: int
    n_heads: int
    head_dim: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    factors: tuple[int, ...]
    token_map: tuple[int, ...]

    @property
    def n_columns(self) -> int:
        """Bucket runs per layer."""
        return (self.max_ngram - 1) * self.n_heads

    @property
    def layer_sizes(self) -> tuple[tuple[int, ...], ...]:
        """Bucket sizes, one tuple per layer."""
        return split_layers(self.sizes, self.n_columns)

    def computed(self, first: int) -> EngramConfig:
        """The configuration these constants should follow from, with primes from ``first`` on."""
        return EngramConfig(
            layers=self.layers,
            n_rows=(),
            max_ngram=self.max_ngram,
            vocab_size=first,
            n_heads=self.n_heads,
            head_dim=self.head_dim,
            pad_token=0,
            n_compressed=max(self.token_map) + 1,
        )


def read_facts(
    keys: Mapping[str, KeyValue], layout: Layout, checks: EngramChecks
) -> EngramFacts | None:
    """The constants, after a check of every key's presence, type and length; else nothing."""
    typed = [
        checks.equal(key, type_name(expected), _type_found(keys.get(key)), cause=_CAUSES.get(key))
        for key, expected in _CONTRACTS[layout].items()
    ]
    if not all(typed):
        return None
    names = _NAMES[layout]
    facts = EngramFacts(
        layers=numbers(keys[names["layers"]]),
        max_ngram=number(keys[names["max_ngram"]]),
        n_heads=number(keys[names["n_heads"]]),
        head_dim=number(keys[names["head_dim"]]),
        sizes=numbers(keys[names["sizes"]]),
        offsets=numbers(keys[names["offsets"]]),
        factors=numbers(keys[names["factors"]]),
        token_map=numbers(keys[f"{_P}engram.token_map"]),
    )
    return facts if _check_lengths(facts, names, checks) else None


def _check_lengths(facts: EngramFacts, names: Mapping[str, str], checks: EngramChecks) -> bool:
    n_layers = len(facts.layers)
    increasing = tuple(sorted(set(facts.layers)))
    results = (
        checks.equal(f"{names['layers']}, increasing", increasing, facts.layers),
        checks.equal(f"entries of {names['sizes']}", n_layers * facts.n_columns, len(facts.sizes)),
        checks.equal(
            f"entries of {names['offsets']}", n_layers * facts.n_columns, len(facts.offsets)
        ),
        checks.equal(
            f"entries of {names['factors']}", n_layers * facts.max_ngram, len(facts.factors)
        ),
    )
    return all(results) and n_layers > 0 and len(facts.token_map) > 0


def check_primes(facts: EngramFacts, first: int, checks: EngramChecks) -> None:
    """The bucket sizes are the primes from ``first`` on, one after the other over all layers."""
    expected = [size for layer in bucket_sizes(facts.computed(first)) for size in layer]
    checks.same_run(
        "bucket sizes are consecutive primes",
        expected,
        facts.sizes,
        cause=_prime_cause(facts),
    )


def _prime_cause(facts: EngramFacts) -> str | None:
    first_layer = facts.layer_sizes[0]
    for layer, sizes in zip(facts.layers[1:], facts.layer_sizes[1:], strict=True):
        if sizes == first_layer:
            return f"The primes start again at layer {layer}; they must run on over all layers."
    for size in facts.sizes:
        if next_prime(size - 1) != size:
            return f"{size:,} is not a prime."
    return "A prime was left out or is not in order."


def check_factors(facts: EngramFacts, checks: EngramChecks) -> None:
    """The multipliers are those drawn for the compressed vocabulary of the token map."""
    drawn = [factor for layer in multipliers(facts.computed(2)) for factor in layer]
    checks.same_run(
        "hash multipliers",
        drawn,
        facts.factors,
        cause=f"They follow from the layer numbers and the {max(facts.token_map) + 1:,} "
        "compressed ids of the token map.",
    )


def type_name(key_type: KeyType) -> str:
    """A value type as text: ``UINT32``, or ``ARRAY of UINT64``."""
    value, element = key_type
    return value.name if element is None else f"{value.name} of {element.name}"


def _type_found(entry: KeyValue | None) -> str:
    return "absent" if entry is None else type_name((entry.type, entry.element))


def number(entry: KeyValue) -> int:
    """The value of an integer entry."""
    assert isinstance(entry.value, int)
    return entry.value


def numbers(entry: KeyValue) -> tuple[int, ...]:
    """The values of an integer array entry."""
    assert isinstance(entry.value, tuple)
    return tuple(int(value) for value in entry.value)
