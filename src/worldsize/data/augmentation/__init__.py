"""Changes of training images beyond crops: policies, operations, mixup and CutMix. Draws are keyed, never sequential.

A policy is one module of `policies`. Read `policies` first.
"""
