"""MNIST: 70,000 handwritten digits of 28x28 pixels; where the file names writers, they can be the clients."""

from perfed.data.images import ImageSet

load = ImageSet("mnist.npz", "ylecun/mnist").load
