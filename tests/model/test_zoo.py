"""Models by name: how their first layer is fitted to the data."""

import pytest
import torch

from hardened_ddp.errors import ModelError
from hardened_ddp.model.zoo import build_model, check_model
from hardened_ddp.settings.config import ModelConfig


def test_a_first_layer_for_grey_images_gives_what_three_equal_channels_gave() -> None:
    models = []
    for channels in (3, 1):
        torch.manual_seed(0)
        config = ModelConfig(model="squeezenet1_1")
        models.append(build_model(config, num_classes=5, input_shape=(channels, 64, 64)).eval())
    rgb, grey = models
    image = torch.rand(2, 1, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(grey(image), rgb(image.expand(-1, 3, -1, -1)))


@pytest.mark.parametrize("shape", [(), (3,), (4, 4), (1, 2, 4, 4)], ids=str)
def test_the_default_model_says_that_it_needs_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="simple_cnn needs images") as caught:
        build_model(ModelConfig(), num_classes=2, input_shape=shape, task="classification")
    assert "--model mlp" in caught.value.fix


def test_a_misspelled_name_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(ModelError, match=r"'simple_cn' \(did you mean simple_cnn"):
        check_model("simple_cn")
    with pytest.raises(ModelError, match="no model is called 'nonet'"):
        check_model("nonet")
