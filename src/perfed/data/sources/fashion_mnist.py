"""Fashion-MNIST: 70,000 pictures of clothes of 28x28 pixels, 10 classes."""

from perfed.data.images import ImageSet

load = ImageSet("fashion_mnist.npz", "zalando-datasets/fashion_mnist").load
