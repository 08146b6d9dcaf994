"""`fedavg`: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

Algorithm 1: in every round the asked sites train E epochs from the current model, and the model becomes the mean of
theirs weighted by images, w ← Σ_k (n_k/n) w_k over the round's participants.

What the paper leaves open: batch norm (there was none; here running statistics are averaged with the weights and
counters never), and which model a site deploys (here the shared one). One round with all epochs in it is one-shot
FedAvg.
"""

from __future__ import annotations

from wardround.methods.template import Averaging


class FedAvg(Averaging):
    """The template as it is."""

    name = "fedavg"
    paper = "McMahan et al., AISTATS 2017"
    summary = "train locally, average the models weighted by images, repeat"
