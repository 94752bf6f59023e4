"""What one step does, nothing else: `base` is the interface, every method has one file."""

from holdfast.learners.agem import AveragedGem
from holdfast.learners.answers import TopK
from holdfast.learners.ballast import Ballast
from holdfast.learners.base import Learner
from holdfast.learners.clser import ClsEr
from holdfast.learners.consistency import ConsistencyReplay
from holdfast.learners.der import DarkReplay
from holdfast.learners.dualnet import DualNet
from holdfast.learners.er import ExperienceReplay
from holdfast.learners.er_ace import AsymmetricReplay
from holdfast.learners.esmer import Esmer
from holdfast.learners.ewc import OnlineEwc
from holdfast.learners.fdr import FunctionDistance
from holdfast.learners.gem import EpisodicGem
from holdfast.learners.icarl import Icarl
from holdfast.learners.losses import Loss, Losses, Offer
from holdfast.learners.lwf import WithoutForgetting
from holdfast.learners.making import Parts, make_learner, settings_for, settings_of
from holdfast.learners.optimizers import FadingRate, Optimizer, PlainSgd, make_optimizer
from holdfast.learners.positions import next_tokens
from holdfast.learners.replay import ReplayLearner
from holdfast.learners.sgd import Joint, Sgd
from holdfast.learners.si import SynapticIntelligence
from holdfast.methods import LEARNERS, method_names

__all__ = [
    "LEARNERS",
    "AsymmetricReplay",
    "AveragedGem",
    "Ballast",
    "ClsEr",
    "ConsistencyReplay",
    "DarkReplay",
    "DualNet",
    "EpisodicGem",
    "Esmer",
    "ExperienceReplay",
    "FadingRate",
    "FunctionDistance",
    "Icarl",
    "Joint",
    "Learner",
    "Loss",
    "Losses",
    "Offer",
    "OnlineEwc",
    "Optimizer",
    "Parts",
    "PlainSgd",
    "ReplayLearner",
    "Sgd",
    "SynapticIntelligence",
    "TopK",
    "WithoutForgetting",
    "make_learner",
    "make_optimizer",
    "method_names",
    "next_tokens",
    "settings_for",
    "settings_of",
]
