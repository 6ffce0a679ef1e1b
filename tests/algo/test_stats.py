import math

import torch

from gruppo.algo.stats import nancenter, nanmax, nanmin, nanstd

NAN = math.nan


def test_nanstd_skips_nan_and_is_bessel_corrected():
    # mean of 1, 2, 6 is 3; squares 4 + 1 + 9 = 14; 14 / (3 − 1) = 7
    assert nanstd(torch.tensor([1.0, NAN, 2.0, 6.0])).item() == torch.tensor(7.0).sqrt().item()


def test_nanstd_needs_two_values():
    x = torch.tensor([[1.0, NAN], [NAN, NAN], [1.0, 3.0]])
    # Row 3: mean 2, squares 1 + 1 = 2, 2 / 1 = 2.
    assert torch.equal(nanstd(x, dim=1).isnan(), torch.tensor([True, True, False]))
    torch.testing.assert_close(nanstd(x, dim=1)[2], torch.tensor(math.sqrt(2)))
    assert nanstd(x, dim=1, keepdim=True).shape == (3, 1)
    assert nanstd(torch.tensor([5.0])).isnan()


def test_nanstd_over_all_and_over_several_dimensions():
    x = torch.arange(8.0).view(2, 2, 2)
    # 0…7: mean 3.5, squares 2·(12.25 + 6.25 + 2.25 + 0.25) = 42, 42 / 7 = 6
    torch.testing.assert_close(nanstd(x), torch.tensor(6.0).sqrt())
    torch.testing.assert_close(nanstd(x, dim=(0, 1, 2)), nanstd(x))
    # Column 0 over the first two dimensions: 0, 2, 4, 6: mean 3, squares 9 + 1 + 1 + 9 = 20, 20 / 3
    torch.testing.assert_close(nanstd(x, dim=(0, 1)), torch.tensor([20 / 3, 20 / 3]).sqrt())


def test_equal_values_have_exactly_no_spread():
    # 0.1 + 0.1 + 0.1 is not 0.3 in binary; a group of equal rewards must still give exactly 0.
    for n in range(2, 40):
        x = torch.full((n,), 0.1)
        assert nanstd(x).item() == 0.0
        assert torch.equal(nancenter(x), torch.zeros(n))


def test_nancenter_keeps_nan_in_place():
    out = nancenter(torch.tensor([[1.0, NAN, 3.0]]), dim=1)
    assert out[0, 0] == -1.0
    assert out[0, 2] == 1.0
    assert out[0, 1].isnan()


def test_an_infinite_value_does_not_pass_as_a_number():
    assert nanstd(torch.tensor([1.0, math.inf])).isnan()
    assert nancenter(torch.tensor([1.0, math.inf])).isnan().all()


def test_nanmin_and_nanmax():
    x = torch.tensor([NAN, 2.0, -1.0, NAN])
    assert nanmin(x).item() == -1.0
    assert nanmax(x).item() == 2.0
    assert nanmax(torch.tensor([-math.inf, NAN])).item() == -math.inf
    for nothing in (torch.tensor([NAN, NAN]), torch.tensor([])):
        assert nanmin(nothing).isnan()
        assert nanmax(nothing).isnan()
        assert nanmax(nothing).shape == ()
