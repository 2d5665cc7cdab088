"""The papers' networks, their first weights, and a user's own module."""

from laconic.models.anatomy import Anatomy, dissect
from laconic.models.assemble import artifact_of, assemble
from laconic.models.catalogue import models
from laconic.models.ensemble import Ensemble
from laconic.models.frozen import signed_constants
from laconic.models.groups import Groups, find_groups
from laconic.models.initial import initialize, load_state, named_scheme, num_parameters, share_gone, sparsity
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
from laconic.models.sequence import char_lstm
from laconic.models.surgery import Plan, multiply_adds, plan, sliced
from laconic.models.two_channel import vqa
from laconic.models.user import user_model

__all__ = [
    "models",
    "initialize",
    "load_state",
    "named_scheme",
    "num_parameters",
    "share_gone",
    "sparsity",
    "signed_constants",
    "user_model",
    # surgery: what units a model has, and the model without some of them
    "Anatomy",
    "dissect",
    "Groups",
    "find_groups",
    "Plan",
    "plan",
    "sliced",
    "multiply_adds",
    # a model's compact form
    "artifact_of",
    "assemble",
    "Ensemble",
    # networks
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
    "char_lstm",
    "BatchNormBlock",
    "GroupNormBlock",
    "PadShortcut",
]
