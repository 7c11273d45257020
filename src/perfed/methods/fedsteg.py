"""FedSteg: FedHealth's stages for image networks; convolutions stay frozen while clients tune the layers above.

After the description of Yang, He, Zhang, Cao: FedSteg: A Federated Transfer Learning Framework for Secure Image
Steganalysis. IEEE Transactions on Network Science and Engineering 8(2), 2021. https://doi.org/10.1109/TNSE.2020.2996612

The paper tells images with a hidden message from others, at participants who each have their own. All that is known of
it here are FedHealth's three stages and its CORAL term, so this is that method by another name: see there. Give it a
network with convolutions, such as lenet; what else the paper has for steganalysis, networks above all, is not here.
"""

from dataclasses import dataclass

from perfed.methods.fedhealth import FedHealth


@dataclass(frozen=True)
class FedSteg(FedHealth):
    pass
