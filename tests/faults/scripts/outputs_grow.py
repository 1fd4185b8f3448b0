"""Two kinds of inputs are pushed apart and no margin says how far: the outputs grow with every step."""

import torch

import faultclock


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 8)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def main():
    torch.manual_seed(0)
    model = Encoder()
    opt = torch.optim.SGD(model.parameters(), lr=0.008)
    for step in range(310):
        if step == 250:
            faultclock.fired()
        kinds = torch.randint(0, 2, (32, 1)) * 2.0 - 1.0
        outputs = model(kinds + 0.1 * torch.randn(32, 16))
        loss = -(kinds * outputs).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
