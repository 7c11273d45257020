"""CIFAR-10: 60,000 colour pictures of 32x32 pixels, 10 classes."""

from perfed.data.images import ImageSet

STRIPS = (*(f"cifar10_train_{number}.npz" for number in range(1, 6)), "cifar10_test.npz")

load = ImageSet("cifar10.npz", "uoft-cs/cifar10", image_column="img", strips=STRIPS).load
