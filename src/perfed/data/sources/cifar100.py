"""CIFAR-100: 60,000 colour pictures of 32x32 pixels, 100 classes."""

from perfed.data.images import ImageSet

COLUMNS = {"image_column": "img", "label_column": "fine_label"}
STRIPS = ("cifar100_train_6bit.npz", "cifar100_test_6bit.npz")

load = ImageSet("cifar100.npz", "uoft-cs/cifar100", **COLUMNS, classes=100, strips=STRIPS).load
