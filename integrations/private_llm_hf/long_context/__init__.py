"""Evaluation on long prompts, in plaintext: made tasks, perplexity after a long text, LongBench and its metrics.

A study generates after each prompt with a cache of its own choice, and scores the text:

    for prompt in make_prompts("passkey", tokenizer, length=1024, count=10, seed=0):
        ids = torch.tensor([prompt.ids])
        made = model.generate(ids, max_new_tokens=answer_tokens(prompt, tokenizer), past_key_values=cache())
        total += score(prompt, tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))

`tasks` has these names; `longbench` has `load_longbench` and its own `score`, `perplexity` has `text_windows` and
`perplexity`, `metrics` what the scores are made of.
"""
