"""Evaluate a plan on a real model and real text, beside the exact cache.

``python -m kvrs.eval perplexity --model gemma --plan turboquant:4 --out result.json`` measures perplexity as
a decoding model would see it; ``passkey`` measures whether a number hidden in a long text is found.
"""
