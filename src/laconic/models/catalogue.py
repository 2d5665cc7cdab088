"""Every network by name: `[model] name = "lenet5_fs"  dropout = true`.

Entries are functions `(shape, classes, *, settings)`: the data gives the first two, a configuration the rest.

>>> net = models.build("mlp", {"hidden": [16, 8]}, given=((1, 4, 4), 3))
>>> [name for name, _ in net.named_parameters()]
['fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias', 'fc3.weight', 'fc3.bias']
"""

from __future__ import annotations

from torch import nn

from laconic.core import Registry
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
from laconic.models.resnet import resnet18, resnet20_gn
from laconic.models.sequence import char_lstm
from laconic.models.two_channel import vqa

models: Registry[nn.Module] = Registry(
    "model",
    [
        logistic,
        mlp,
        lg_mlp,
        lenet5_fs,
        lenet5,
        lg_cnn,
        lg_adult,
        conv4,
        conv6,
        conv10,
        cifarnet,
        vgg_like,
        resnet20_gn,
        resnet18,
        vqa,
        char_lstm,
    ],
)
