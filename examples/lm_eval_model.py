"""Evaluates a model with EleutherAI's `lm-eval`. Its answers are decoded in slots, with drafts.

    pip install lm-eval    # 0.4.13; it needs no PyTorch
    python examples/lm_eval_model.py --model=spectr_jax --model_args=target=20m,slots=4 --tasks=FOLDER

FOLDER has task files (.yaml). The arguments are those of `lm-eval run`. In Python, import this file
and call `lm_eval.simple_evaluate("spectr_jax", "target=20m,slots=4", tasks)`.
"""

import jax
from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from spectr_jax import Policy, get_method
from spectr_jax.decoding.scoring import score_all
from spectr_jax.decoding.slots import generate_all
from spectr_jax.decoding.stopping import before
from spectr_jax.sampling.session import open_session
from spectr_jax.utils.errors import UserError


@register_model("spectr_jax")
class SpectrJax(TemplateLM):
    """A target with the draft and the method that speed up its answers, as in `sample`."""

    prefix_token_id = eot_token_id = tokenizer_name = None  # Properties of the base; set below.

    def __init__(self, target="20m", draft=None, method=None, dtype=None, slots=8, seed=0, **rest):
        super().__init__()
        for name in ("batch_size", "max_batch_size", "device"):  # Every model is given these.
            rest.pop(name, None)
        method = get_method(method or "block", **rest) if method or rest else None
        self.session = open_session(method, str(target), draft, dtype, 1, Policy())
        self.room, self.tokenizer = self.session.target_model.context, self.session.target.tokenizer
        self.prefix_token_id, self.tokenizer_name = self.tokenizer.bos, self.tokenizer.vocabulary
        self.slots, self.key = slots, jax.random.key(seed)

    def tok_encode(self, string, add_special_tokens=None, **_):
        tokens = self.tokenizer.encode(string)
        whole = add_special_tokens is False or tokens[:1] == [self.tokenizer.bos]
        return tokens if whole else self.tokenizer.prompt(string)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        rows = [(context[-max(self.room + 1 - len(new), 1) :], new) for _, context, new in requests]
        scores = score_all(self.session.target_model, [context + new for context, new in rows])
        return [
            (float(logprobs[len(context) - 1 :].sum()), bool(greedy[len(context) - 1 :].all()))
            for (logprobs, greedy), (context, _) in zip(scores, rows, strict=True)
        ]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        windows, totals = [], [0.0] * len(requests)
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            pairs = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.room, 1)
            windows += [(index, *utils.make_disjoint_window(pair)) for pair in pairs]
        for window, scored in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[window[0]] += scored[0]
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        session, decode, answers = self.session, self.tokenizer.decode, [""] * len(requests)
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        groups = {str(given): self._options(given) for _, given in (each.args for each in requests)}
        for group, (policy, until, new) in groups.items():
            others = {i for i, request in enumerate(requests) if str(request.args[1]) != group}
            models = self.key, session.method, session.target, session.draft
            kept = [tokens[-max(self.room - new, 1) :] for tokens in prompts]
            options = {"stop": until, "slots": self.slots, "skip": others}
            done = generate_all(*models, kept, new, policy, **options)
            for each in tqdm(done, total=len(requests) - len(others), disable=disable_tqdm):
                text = decode(each.tokens)[len(decode(each.tokens[: each.prompt_length])) :]
                answers[each.index] = answer = before(text, until)
                self.cache_hook.add_partial("generate_until", requests[each.index].args, answer)
        return answers

    def _options(self, given):
        options = normalize_gen_kwargs(given)
        until, new = [each for each in options.pop("until") if each], options.pop("max_gen_toks")
        options.setdefault("temperature", float(options.pop("do_sample")))
        if unknown := sorted(options.keys() - {"temperature", "top_k", "top_p", "min_p"}):
            raise UserError(f"generation_kwargs: {unknown[0]!r} is not supported; leave it out")
        return Policy(**options, eos=self.tokenizer.eos), until, new

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        if not add_generation_prompt:  # The answer continues the last message.
            return self.apply_chat_template(chat_history[:-1]) + chat_history[-1]["content"]
        return self.tokenizer.chat_text(chat_history)


if __name__ == "__main__":
    try:
        cli_evaluate()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
