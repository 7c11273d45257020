"""A method is one short file: a frozen dataclass whose fields are its hyper-parameters, with six pure functions.

All six are written for plain tensors; `local` and `personalise` for ONE client, and they run under vmap: no `if` on a
tensor, no `.item()`, no writing into inputs, the same shapes for every client, and no randomness but the batches'.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from perfed.core.context import Context
from perfed.core.data import Data
from perfed.core.errors import Problem
from perfed.core.fields import Evaluates, checked, convert, hyper
from perfed.core.messages import Cohort, Down, Extension, Up
from perfed.core.model import Batch, Model, Part
from perfed.core.optim import adam, adam_start, sgd
from perfed.core.rounds import Known, Phase, Selection
from perfed.core.tree import leaves, tree_map

State = Any  # a tree of tensors: dicts, tuples, lists
Gradient = Callable[[Tensor, Batch, Any], tuple[Tensor, Tensor]]  # (theta, batch, given) -> (g, theta)

FINE_TUNING = 9  # stream of the batches used after training
# What methods defined or read before there were phases and a context: in silence it would have no effect.
FORMER = {
    "exchanges": "`phase(self, server)`, which returns Phase(exchanges=...)",
    "select": "`cohort_of(self, server, info)`",
}
FORMER_FIELDS = ("seed", "cohort", "population")


@dataclass(frozen=True)
class Method(ABC):
    """Define a method: common hyper-parameters, the six functions, and the tools to write them with.

    Attributes:
        evaluates: what `personalise` returns: a client's own model, one that it assembles, one that it adapts, or one
            global model.
        category: place in the survey's taxonomy.
        vectorised: False where `local` cannot run under vmap; it then runs client by client.
        mixture: True where clients mix branches, with the weights that `weights(client)` returns.
        starts: the setting that says how many initial models there are, which must differ or stay equal for ever.
        warms_up: the setting that says after how many rounds a method's own begin; before them it is another one.
        own_networks: True where clients may have networks that differ; `model` is then the client's own.
        context: where in a run its functions are called.
        averages: False where the server does not simply add the mean of `Up.mean`, the change of a model: no optimiser
            of a server steps in its place then.
        public: what it needs of public samples: none, some, or some with labels; the labels of others it does not see.
        sends_public: True where clients use `data.public`; each is sent the samples once, which is traffic.
        refine_before: True where `refine` also runs before round 1.
        extends_in: the phase before a client's first exchange of which `extend` runs; empty: whichever comes first.
    """

    model: Model
    lr: float = hyper(0.1, "learning rate of local training", above=0)
    momentum: float = hyper(0.0, "momentum of local SGD; its buffer is new every round", at_least=0, below=1)
    nesterov: bool = hyper(False, "Nesterov momentum")
    weight_decay: float = hyper(0.0, "L2 decay added to the gradient, as in PyTorch", at_least=0)
    clip: float = hyper(
        0.0, "largest norm of a local step's gradient, longer ones are shortened; 0: no limit", at_least=0
    )
    optimizer: Literal["sgd", "adam"] = hyper("sgd", "local optimiser")
    epochs: int = hyper(5, "local epochs per round", at_least=1, at_most=10_000)
    batch_size: int = hyper(
        10, "samples per local step; the last, partial batch is kept", at_least=1, at_most=1_000_000_000
    )
    fine_tune: int = hyper(
        0, "epochs of local training before a model is evaluated, of which nothing is kept", at_least=0, at_most=10_000
    )

    context: ClassVar[Context] = Context()  # an instance of a run has its own, see `at`
    evaluates: ClassVar[Evaluates] = "own"
    category: ClassVar[str] = ""
    vectorised: ClassVar[bool] = True
    mixture: ClassVar[bool] = False
    starts: ClassVar[str] = ""
    warms_up: ClassVar[str] = ""
    averages: ClassVar[bool] = True
    public: ClassVar[Literal["", "unlabelled", "labelled"]] = ""
    sends_public: ClassVar[bool] = False
    refine_before: ClassVar[bool] = False
    extends_in: ClassVar[str] = ""
    own_networks: ClassVar[bool] = False

    @classmethod
    def refuse_undeclared(cls) -> None:
        """Raise a Problem where the class is no frozen dataclass, or `evaluates` is none of its four values."""
        params = vars(cls).get("__dataclass_params__")
        if params is None or not params.frozen:
            raise Problem(f"{cls.__name__} needs @dataclass(frozen=True): a method is a frozen dataclass")
        convert(cls.evaluates, Evaluates, {}, f"{cls.__name__}.evaluates")
        convert(cls.public, Literal["", "unlabelled", "labelled"], {}, f"{cls.__name__}.public")
        if cls.sends_public and not cls.public:
            raise Problem(f"{cls.__name__} sends public samples: public says which, 'unlabelled' or 'labelled'")
        for name, instead in FORMER.items():
            if hasattr(cls, name):
                raise Problem(f"{cls.__name__} defines '{name}', which nobody asks for any more: define {instead}")

    @classmethod
    def computed_once(cls) -> list[str]:
        """Return the names of the properties that are computed once, from settings and model."""
        values = [pair for each in cls.__mro__ for pair in vars(each).items()]
        return [name for name, value in values if isinstance(value, cached_property)]

    def __post_init__(self) -> None:
        self.refuse_undeclared()
        checked(self, type(self).__name__.lower(), skip=("model",))
        if self.nesterov and not self.momentum:
            raise Problem("nesterov needs momentum above 0")
        if self.optimizer != "sgd" and self.momentum:
            raise Problem(f"momentum belongs to sgd: set momentum to 0 for {self.optimizer}")
        self.check()

    def check(self) -> None:  # noqa: B027 (most methods have nothing to refuse)
        """Raise a Problem where hyper-parameters do not go together."""

    def __getattr__(self, name: str) -> Any:
        if name in FORMER_FIELDS:
            raise Problem(f"{type(self).__name__} reads self.{name}: what the run decides is in self.context.{name}")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'", name=name, obj=self)

    def at(self, **place: Any) -> Self:
        """Return this method at another place in a run.

        Args:
            place: what changes in its context, such as `round=3`.
        """
        if place.get("networks") is not None and not self.own_networks:
            raise Problem(
                f"{type(self).__name__} is not made for clients whose networks differ "
                f"({', '.join(place['networks'].names)}): all need the same one"
            )
        other = object.__new__(type(self))
        vars(other).update(vars(self), context=replace(self.context, **place))  # frozen for everybody else
        return other

    @property
    def networks(self) -> tuple[Model, ...]:
        """Return the models of all networks by number; one, where all clients have the same."""
        several = self.context.networks
        return (self.model,) if several is None else several.models

    @property
    def network_of(self) -> Tensor:
        """Return the number of each client's network: [clients]."""
        several = self.context.networks
        if several is None:
            return torch.zeros(self.context.population, dtype=torch.int64, device=self.model.device)
        return several.where

    def with_network(self, number: int) -> Self:
        """Return this method as it is for clients with one of the networks, as for a server that trains each.

        Args:
            number: the network's.
        """
        other = self.at(network=number)
        for name in self.computed_once():  # from the other model
            vars(other).pop(name, None)
        object.__setattr__(other, "model", self.networks[number])  # frozen for everybody else
        return other

    def own_model(self, id: int) -> Model:
        """Return the model of a client's network."""
        several = self.context.networks
        return self.model if several is None else several.models[several.of[id]]

    @property
    def groups(self) -> int:
        """Return the number of groups that `Up.group` may name."""
        return 1

    @property
    def sent(self) -> Part:
        """Return the part of theta whose change `Up.mean` is, where it is not all of theta."""
        return self.model.everything

    @property
    def refines(self) -> bool:
        """Return True if the server trains, too: the method has a `refine` of its own."""
        return type(self).refine is not Method.refine

    @property
    def public_sent(self) -> int:
        """Return how many of the public samples each client is sent, once, where `sends_public` is True."""
        return self.context.public

    @property
    def reads_labels(self) -> bool:
        """Return True if labels of public samples are read, as `public` says; a method's setting may decide it."""
        return self.public == "labelled"

    @property
    def extends(self) -> bool:
        """Return True if clients make samples for themselves: the method has an `extend` of its own."""
        return type(self).extend is not Method.extend

    @property
    def one_for_all(self) -> bool:
        """Return True if all clients predict with one model, so that an evaluation may score their samples together."""
        return self.evaluates == "global" and not self.fine_tune and self.context.networks is None

    # ------------------------------------------------------------------ the six functions

    @abstractmethod
    def init_server(self, clients: int, /) -> State:
        """Make what the server knows before round 1.

        Args:
            clients: number of clients in all.

        Returns:
            The server's state, a tree of tensors.
        """

    def init_client(self) -> State:
        """Make what a client knows before its first round; a client's state never leaves the client.

        Returns:
            A tree of tensors, alike for all clients.
        """
        return ()

    def broadcast(self, server: State, ids: Tensor, /) -> Down:  # noqa: ARG002
        """Make what the server sends in an exchange; by default its whole state.

        Args:
            server: the server's state.
            ids: the clients that take part, ascending.

        Returns:
            The message; each tensor in its `own` has a row for each client.
        """
        return Down(shared=server)

    @abstractmethod
    def local(self, client: State, down: Down, data: Data, /) -> tuple[State, Up]:
        """Carry out ONE client's part in an exchange; pure, and run under vmap.

        Args:
            client: the client's state.
            down: what the server sent; `own` is this client's row.
            data: the client's samples.

        Returns:
            The client's new state and its message to the server.
        """

    @abstractmethod
    def aggregate(self, server: State, cohort: Cohort, /) -> State:
        """Make the server's new state from the uploads of an exchange.

        Args:
            server: the server's state.
            cohort: weighted means and rows of what the clients sent.

        Returns:
            The server's state for the next exchange.
        """

    @abstractmethod
    def personalise(self, client: State, down: Down, data: Data, /) -> Any:
        """Make the model that ONE client predicts with; pure, and run under vmap.

        Args:
            client: the client's state.
            down: what `show` makes for an evaluation; `own` is this client's row.
            data: the client's samples.

        Returns:
            A model, or a dict of models whose headline is 'personal'. A model is a theta, or any tree of tensors that
            `predict` knows how to predict with.
        """

    def predict(self, model: Any, x: Tensor, /) -> Tensor:
        """Return the outputs of a model for some samples; by default those of the network with a theta.

        Scores, saved models and `perfed predict` follow from it.

        Args:
            model: what `personalise` returned, one of them where it returned several.
            x: inputs [samples, ...].

        Returns:
            Outputs [samples, ...], as the task has them: see perfed.core.task.
        """
        self._refuse_no_theta(model)
        return self.model.apply(model, x)[0]

    @classmethod
    def has_own_predict(cls) -> bool:
        """Return True if a model is more than a network with its theta, so that only this method predicts with it."""
        return cls.predict is not Method.predict

    def _refuse_no_theta(self, model: Any) -> None:
        """Raise a Problem where a model is something else than a theta."""
        shape = (self.model.width,)
        if isinstance(model, Tensor) and model.shape == shape:
            return
        if isinstance(model, dict):
            kind = f"a dict of {', '.join(map(repr, model))}"
        else:
            kind = f"shape {tuple(model.shape)}" if isinstance(model, Tensor) else type(model).__name__
        raise Problem(
            f"{type(self).__name__}.personalise must return theta, a tensor of shape {shape}, or a dict of thetas with "
            f"the key 'personal', not {kind}: a model of another form needs a function `predict`"
        )

    def refine(self, server: State, cohort: Cohort | None, public: Data, /) -> State:  # noqa: ARG002
        """Train at the server, after every `aggregate`; by default nothing is done.

        It is written as `local` is, under whose rules what comes of `public.fold`, `public.mean` and `public.map` is.

        Args:
            server: what `aggregate` returned.
            cohort: what `aggregate` was given; None before round 1, where `refine_before` asks for it.
            public: the public samples as the server's own; without `public`, a single blank one, whose folds give
                steps their keys.

        Returns:
            The server's state, of the same form.
        """
        return server

    def extend(self, client: State, down: Down, data: Data, /) -> Extension:
        """Make samples for ONE client's training set, once: before it first trains (see `extends_in`); under vmap.

        Args:
            client: the client's state.
            down: what it receives in this exchange.
            data: the client's own samples.

        Returns:
            The samples that join, and which of its own stay. All that follows sees them in `data`.
        """
        raise NotImplementedError

    def newcomer(self, server: State, /) -> Down:
        """Return what a `server` sends to ONE client that never took part; by default what it sends to everybody."""
        down = self.broadcast(server, torch.arange(0))
        if leaves(down.own) or down.mask is not None:
            name = type(self).__name__
            raise Problem(
                f"{name} keeps something for each client it knows, so it has nothing to send to a new one, unless its "
                "file says what: `newcomer(server)` returns a Down with that client's row in `own`"
            )
        return down

    def global_model(self, server: State, /) -> Tensor:
        """Return the model that the server has for everybody.

        By default all that the server has; where it has nothing, the initial model.

        Args:
            server: the server's state.
        """
        if self.context.networks is not None:
            raise Problem(f"{type(self).__name__} has no model for everybody: clients have networks that differ")
        if isinstance(server, Tensor):
            return server
        if leaves(server):
            raise Problem(f"{type(self).__name__} does not say which model its server has for everybody")
        return self.model.init(self.context.seed)

    def before_round(self, server: State, info: Known, /) -> State:  # noqa: ARG002
        """Make the server's state that a round begins with, from what is known of the clients by then.

        Here a server learns who failed in the last round, and how long the others took. By default nothing is done.

        Args:
            server: the server's state after the last round, also where that had no answer or was abandoned.
            info: what is known of the clients.

        Returns:
            The server's state, of the same form; it stays if the round is abandoned.
        """
        return server

    def phase(self, server: State, /) -> Phase:  # noqa: ARG002
        """Return what kind of round comes next; by default every round is alike and has one exchange.

        Args:
            server: the server's state.
        """
        return Phase()

    def cohort_of(self, server: State, info: Known, /) -> Sequence[int] | Sequence[Sequence[int]] | Selection:  # noqa: ARG002
        """Choose who takes part in the next round, out of all clients; by default those whom the run draws.

        Args:
            server: the server's state.
            info: what is known of the clients; `info.draw()` draws as the run says.

        Returns:
            The clients; or a list of clients for each exchange; or a `Selection`, which also says how much each does.
        """
        return info.draw()

    @property
    def client_part(self) -> Callable[[State, Down, Data], tuple[State, Up]]:
        """Return the clients' part in the phase that the context names: `local_<name>` where there is one."""
        return getattr(self, f"local_{self.context.phase}", self.local) if self.context.phase else self.local

    def show(self, server: State, ids: Tensor, /) -> Down:
        """Return what the clients `ids` receive of a `server` for an evaluation; by default what a round begins with.

        It is no traffic.
        """
        return self.broadcast(server, ids)

    def extra_traffic(self, server: State, /) -> dict[str, int]:  # noqa: ARG002
        """Return how many numbers other parties sent in the round that made this `server`, such as cloud to team."""
        return {}

    def batch_traffic(self, samples: int, /) -> dict[str, int]:  # noqa: ARG002
        """Return how many numbers clients and server exchange while clients train, as in split learning.

        They are counted beside `Up.own` and `Down.own`, for they are read client by client.

        Args:
            samples: training samples that the clients of an exchange went through, each as often as it has epochs.

        Returns:
            Numbers by direction, 'up' and 'down'; by default none.
        """
        return {}

    def notes(self, server: State, /) -> dict[str, Any]:  # noqa: ARG002
        """Return plain numbers of a `server` that are logged with every evaluation, such as cluster sizes."""
        return {}

    # ------------------------------------------------------------------ tools

    def pull(self, theta: Tensor, centre: Tensor) -> Tensor:
        """Return theta - centre, 0 at buffers: the gradient of half the squared distance of the parameters."""
        return self.model.weights.only(theta - centre) if self.model.fixed else theta - centre

    def gradient(self, theta: Tensor, batch: Batch, given: Any = (), /) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return the gradient of a batch's loss at theta, and theta with fresh statistics; `given` is not looked at."""
        g, theta, _ = self.model.grad(theta, batch)
        return g, theta

    def start(self, theta: Tensor) -> Any:
        """Return the optimiser's state before its first step from theta."""
        if self.optimizer != "sgd":
            return adam_start(theta)
        return torch.zeros_like(theta if self.momentum else theta[:0])  # without momentum there is nothing to carry

    def clipped(self, g: Tensor) -> Tensor:
        """Return the gradient `g`, shortened to the norm `clip` where it is longer, as by PyTorch's clip_grad_norm_."""
        return g * (self.clip / (g.norm() + 1e-6)).clamp_max(1) if self.clip else g

    def update(
        self, theta: Tensor, state: Any, g: Tensor, only: str | None = None, model: Model | None = None
    ) -> tuple[Tensor, Any]:
        """Take one optimiser step: along the gradient, clipped, with what weight decay adds to it.

        Args:
            theta: the model.
            state: the optimiser's, see `start`.
            g: the gradient.
            only: the part that is trained, as `Model.part` names it; all else gets no gradient, decay or momentum.
            model: whose theta it is, such as a further network's; None: the method's own.

        Returns:
            Theta and state after the step.
        """
        model = model or self.model
        if only is not None:
            g = model.part(only).only(g)  # before the decay: an engine sees that the rest is not needed
        g = self.clipped(g)
        if self.weight_decay:
            decayed = model.weights.only(theta) if model.fixed else theta
            g = g + self.weight_decay * (decayed if only is None else model.part(only).only(decayed))
        if self.optimizer == "sgd":
            moved, state = sgd(theta, state, g, self.lr, self.momentum, self.nesterov)
        else:
            moved, state = adam(theta, state, g, self.lr)
        return (moved if only is None else model.part(only).only(moved, theta)), state

    def _descent(
        self, gradient: Callable[..., Any], only: str | None, carry: tuple[Tensor, Any], batch: Batch, given: Any
    ) -> tuple[Tensor, Any]:
        theta, state = carry
        g, fresh = gradient(self, theta, batch, given)
        if only is not None and self.model.Q:
            fresh = self.model.part(only).only(fresh, theta)  # statistics of a frozen part stay frozen
        return self.update(fresh, state, g, only)

    def descend(
        self,
        theta: Tensor,
        data: Data,
        gradient: Gradient | None = None,
        given: Any = (),
        *,
        only: str | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        stream: int = 0,
    ) -> Tensor:
        """Train locally.

        Args:
            theta: where to start.
            data: the client's samples.
            gradient: a method `gradient(theta, batch, given)` that returns (g, theta); None: that of the loss.
            given: a tree of tensors for it.
            only: the part that is trained; None: everything.
            epochs: as in `Data.fold`.
            steps: as in `Data.fold`.
            stream: as in `Data.fold`.

        Returns:
            Theta after training.
        """
        function = (gradient or self.gradient).__func__  # pyright: ignore[reportFunctionMemberAccess]
        step = functools.partial(self._descent, function, only)
        carry = (theta, self.start(theta))
        return data.fold(step, carry, given, epochs=epochs, steps=steps, stream=stream)[0]

    def rate(self, batch: Batch, models: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Return the task's numbers of each of the `models` on every sample of a batch, such as loss and accuracy."""
        return {name: self.model.task.rates(self.predict(model, batch.x), batch.y) for name, model in models.items()}

    def at_rate(self, lr: float) -> Self:
        """Return this method with the learning rate `lr`, for a phase of its own."""
        other = copy.copy(self)
        object.__setattr__(other, "lr", lr)  # frozen for everybody else
        return other

    def score(self, batch: Batch, models: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Return the means over a batch of what `rate` says of each of the `models`."""
        rates, weight = self.rate(batch, models), batch.weight
        if weight is None:
            return tree_map(lambda each: each.sum() / len(batch.y), rates)
        return tree_map(lambda each: (each * weight).sum() / weight.sum(), rates)

    def models(self, client: State, down: Down, data: Data) -> dict[str, Any]:
        """Return what is evaluated and saved for a client: its personal model, fine-tuned where that is asked for.

        Args:
            client: the client's state.
            down: what `show` makes for an evaluation.
            data: the client's samples.

        Returns:
            Name -> model.
        """
        own = self.personalise(client, down, data)
        models: dict[str, Any] = dict(own) if isinstance(own, dict) and "personal" in own else {"personal": own}
        if not leaves(own) or not all(isinstance(leaf, Tensor) for leaf in leaves(own)):
            raise Problem(f"{type(self).__name__}.personalise must return tensors, alone or in dicts, tuples and lists")
        if self.fine_tune:
            if not isinstance(models["personal"], Tensor) and type(self).tuned is Method.tuned:
                raise Problem(
                    f"fine_tune trains a theta, and a model of {type(self).__name__} is more than that: its file needs "
                    "a function `tuned(model, client, down, data)`, which trains for `self.fine_tune` epochs"
                )
            models["before"] = models["personal"]
            models["personal"] = self.tuned(models["before"], client, down, data)
        return models

    def tuned(self, theta: Tensor, client: State, down: Down, data: Data, /) -> Tensor:  # noqa: ARG002
        """Train a client's personal model for `fine_tune` more epochs, for one evaluation: no state is kept.

        Args:
            theta: the personal model, all of it where it is more than a theta.
            client: the client's state.
            down: what `show` makes for an evaluation.
            data: the client's samples.

        Returns:
            The model after plain local training, or what a method does instead.
        """
        self._refuse_no_theta(theta)
        return self.descend(theta, data, epochs=self.fine_tune, stream=FINE_TUNING)
