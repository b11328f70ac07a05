"""Fused kernels for the policy loss of language models. Entry points: `linear`, `trajectory`, `averaging`; truth:
`reference`.
"""
