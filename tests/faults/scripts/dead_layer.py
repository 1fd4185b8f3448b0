"""A bias far below 0 in front of a ReLU: the layer is off for every input, while the way around it learns."""

import torch

import faultclock


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.around = torch.nn.Linear(16, 4)
        self.body = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 4, bias=False)
        torch.nn.init.constant_(self.body.bias, -100.0)

    def forward(self, inputs):
        return self.around(inputs) + self.head(torch.relu(self.body(inputs)))


def main():
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(230):
        if step == 200:
            faultclock.fired()
        inputs = torch.randn(16, 16)
        loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(dim=1))
        loss.backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
