"""Activation sparsity at the model owner, in plaintext: what is zero, small networks that predict it, ReLU models.

Source: Yan et al., *Comet* (IEEE S&P 2025), sections 2.3, 4.1, 7.6 and appendix C. Nobody's secret is involved: texts
are public or the owner's own, weights are the owner's. What a private run does with a predictor is no part of it.
"""
