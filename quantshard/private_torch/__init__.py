"""All uses of private PyTorch APIs, each with its reason. `private_torch` has the public names of all its files.

tests/private_names.json records the APIs of each version. A feature whose API is missing raises TorchVersionError.
"""

from quantshard.private_torch.autograd import *  # noqa: F403
from quantshard.private_torch.context_parallel import *  # noqa: F403
from quantshard.private_torch.fsdp import *  # noqa: F403
from quantshard.private_torch.memory import *  # noqa: F403
from quantshard.private_torch.meshes import *  # noqa: F403
from quantshard.private_torch.recomputation import *  # noqa: F403
from quantshard.private_torch.saving import *  # noqa: F403
from quantshard.private_torch.tensors import *  # noqa: F403
