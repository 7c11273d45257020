"""USPS: 9,298 handwritten digits of 16x16 pixels."""

from perfed.data.images import ImageSet

load = ImageSet("usps.npz", "flwrlabs/usps").load
