"""The papers' networks, their first weights, and a user's own module."""

from laconic.models.catalogue import models
from laconic.models.initial import initialize, load_state, num_parameters
from laconic.models.plain import (
    cifarnet,
    conv4,
    conv6,
    conv10,
    lenet5,
    lenet5_fs,
    lg_adult,
    lg_cnn,
    lg_mlp,
    logistic,
    mlp,
    vgg_like,
)
from laconic.models.resnet import BatchNormBlock, GroupNormBlock, PadShortcut, resnet18, resnet20_gn
from laconic.models.two_channel import vqa
from laconic.models.user import user_model

__all__ = [
    "models",
    "initialize",
    "load_state",
    "num_parameters",
    "user_model",
    "cifarnet",
    "conv4",
    "conv6",
    "conv10",
    "lenet5",
    "lenet5_fs",
    "lg_adult",
    "lg_cnn",
    "lg_mlp",
    "logistic",
    "mlp",
    "resnet18",
    "resnet20_gn",
    "vgg_like",
    "vqa",
    "BatchNormBlock",
    "GroupNormBlock",
    "PadShortcut",
]
