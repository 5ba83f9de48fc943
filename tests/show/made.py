"""LayerPredictions made from seeded random logits: every number is what a lens would compute."""

import numpy as np

from lens.lenses.predictions import NO_TOKEN, LayerPredictions, Provenance

AWKWARD = {
    "script": "</script><script>window.hacked=1</script>",
    "bold": "<b>bold</b>",
    "image": '"><img src=x onerror="window.hacked=1">',
    "dollars": "$$x^2$$",
    "entity": "&amp;",
    "template": "%{x}<extra></extra>",
    "newline": "\n",
    "crlf": "\r\n",
    "tab": "\t",
    "space": " ",
    "spaces": " " * 8,
    "no_break_space": "\u00a0",
    "zero_width": "\u200b",
    "bidi_override": "\u202eabc",
    "byte_order_mark": "\ufeff",
    "nul": "\x00",
    "broken": "\ufffd",
    "broken_too": "\ufffd\ufffd",
    "surrogate": "\udce2",
    "surrogate_pair": "\ud83d\ude00",
    "combining": "\u0301",
    "cjk": "東京",
    "arabic": "مرحبا",
    "hebrew": " שלום",
    "emoji": "👩‍🚀",
    "empty": "",
    "quote": '"',
    "backslash": "\\",
    "comma": ",",
    "formula": "=1+1",
    "missing": "NA",
    "hash": "# lens",
}

WORDS = [" the", " city", " of", " Paris", " Rome", " is", " located", "The", " Tower", "E", "iff"]


def provenance(**changes):
    """A plausible provenance; pass a field to change it."""
    fields = {
        "model_id": "made/up-model",
        "revision": None,
        "model_class": "GPT2LMHeadModel",
        "model_hash": "a" * 64,
        "tie": "tied",
        "lens": "output",
        "readout": "direct",
        "target": "next",
        "dtype": "float32",
        "n_layers": 12,
        "d_model": 64,
        "d_vocab": 96,
        "layer_convention": "layer l is the state after l blocks",
        "versions": {"lens": "0.1.0", "numpy": np.__version__},
        "notes": (),
    }
    return Provenance(**{**fields, **changes})


def made(
    *,
    prompt=12,
    layers=13,
    k=5,
    seed=0,
    awkward=True,
    sets=None,
    dtype=np.float32,
    positions=None,
    **changes,
):
    """A result whose early layers copy the input and whose late layers reach the final answer."""
    rng = np.random.default_rng(seed)
    texts = [*WORDS, *(AWKWARD.values() if awkward else ())]
    texts += [f" w{i}" for i in range(96 - len(texts))]
    d_vocab = len(texts) + 4  # rows past the tokenizer
    input_ids = rng.integers(0, len(texts), prompt)
    positions = np.arange(prompt) if positions is None else np.asarray(positions)
    final = rng.normal(size=(len(positions), d_vocab)) * 2
    final[np.arange(len(positions)), rng.integers(0, d_vocab, len(positions))] += 7
    depth = np.linspace(0, 1, layers)[:, None, None] if layers > 1 else np.ones((1, 1, 1))
    copy = np.zeros_like(final)
    copy[np.arange(len(positions)), input_ids[positions]] = 9
    noise = rng.normal(size=(layers, len(positions), d_vocab))
    logits = depth**2 * final + (1 - depth) ** 2 * copy + 1.5 * depth * (1 - depth) * noise
    return from_logits(
        logits,
        final,
        input_ids=input_ids,
        positions=positions,
        vocabulary=dict(enumerate(texts)),
        k=k,
        sets=sets or {},
        dtype=dtype,
        source=provenance(**{"n_layers": layers - 1, "d_vocab": d_vocab, **changes}),
    )


def from_logits(logits, final, *, input_ids, positions, vocabulary, k, sets, dtype, source):
    """Every number of a result from logits [layer, pos, d_vocab], by its definition."""
    logprob = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    last = final - np.logaddexp.reduce(final, axis=-1, keepdims=True)
    bits = logprob / np.log(2)
    top = np.argsort(-logits, axis=-1, kind="stable")[:, :, :k]
    following = np.append(input_ids, NO_TOKEN)[1:][positions]
    best = final.argmax(-1)
    at = np.arange(len(positions))

    def scored(ids):
        known = np.where(ids == NO_TOKEN, 0, ids)
        value = np.where(ids == NO_TOKEN, np.nan, bits[:, at, known])
        higher = (logits > logits[:, at, known][:, :, None]).sum(-1)
        return value.astype(dtype), np.where(ids == NO_TOKEN, -1, higher)

    target_bits, target_rank = scored(following)
    best_bits, best_rank = scored(best)
    of_sets = [np.logaddexp.reduce(logprob[:, :, list(s)], axis=-1) for s in sets.values()]
    return LayerPredictions(
        input_ids=input_ids,
        positions=positions,
        layers=np.arange(len(logits)),
        top_ids=top,
        top_logprob_bits=np.take_along_axis(bits, top, axis=-1).astype(dtype),
        entropy_bits=-(np.exp(logprob) * bits).sum(-1).astype(dtype),
        kl_bits=np.maximum((np.exp(last) * (last - logprob)).sum(-1) / np.log(2), 0).astype(dtype),
        target_ids=following,
        target_logprob_bits=target_bits,
        target_rank=target_rank,
        final_top_ids=best,
        final_top_logprob_bits=best_bits,
        final_top_rank=best_rank,
        self_copy_mass=np.exp(logprob[:, at, input_ids[positions]]).astype(dtype),
        vocabulary=vocabulary,
        provenance=source,
        set_names=tuple(sets),
        set_ids=tuple(tuple(ids) for ids in sets.values()),
        set_logprob_bits=(np.stack(of_sets) / np.log(2)).astype(dtype) if sets else None,
    )
