"""Trains the tokenizer that ships with the package, from text made here.

The corpus is word lists with their inflections, sentences of the synthetic language and lines of code. It is written to
model_check/data/builtin_tokenizer.json; training it anew changes its fingerprint, and with it every cache key.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from model_check.data.synthetic import WORDS
from model_check.data.tokenizer import END_OF_TEXT

VOCABULARY = 4096
TARGET = Path(__file__).resolve().parents[1] / "model_check" / "data" / "builtin_tokenizer.json"

EVERYDAY_WORDS = """
the of and to a in is it you that he was for on are with as I his they be at one have this from or had by
hot but some what there we can out other were all your when up use how said an each she which do their time if will way
about many then them would write like so these her long make thing see him two has look more day could go come did my
sound no most number who over know water than call first people may down side been now find any new work part take get
place made live where after back little only round man year came show every good me give our under name very through
just form much great think say help low line before turn cause same mean differ move right boy old too does tell
sentence set three want air well also play small end put home read hand port large spell add even land here must big
high such follow act why ask men change went light kind off need house picture try us again animal point mother world
near build self earth father head stand own page should country found answer school grow study still learn plant cover
food sun four thought let keep eye never last door between city tree cross since hard start might story saw far sea
draw left late run while press close night real life few stop open seem together next white children begin got walk
example ease paper often always music those both mark book letter until mile river car feet care second group carry
took rain eat room friend began idea fish mountain north once base hear horse cut sure watch color face wood main
enough plain girl usual young ready above ever red list though feel talk bird soon body dog family direct pose leave
song measure state product black short numeral class wind question happen complete ship area half rock order fire
south problem piece told knew pass farm top whole king size heard best hour better true during hundred remember step
early hold west ground interest reach fast five sing listen six table travel less morning ten simple several vowel
toward war lay against pattern slow center love person money serve appear road map science rule govern pull cold
notice voice fall power town fine certain fly unit lead cry dark machine note wait plan figure star box noun field
rest correct able pound done beauty drive stood contain front teach week final gave green quick develop sleep warm
free minute strong special mind behind clear tail produce fact street inch lot nothing course stay wheel full force
blue object decide surface deep moon island foot yet busy test record boat common gold possible plane age dry wonder
laugh thousand ago ran check game shape yes miss brought heat snow bed bring sit perhaps fill east weight language
among not because into its being without within another however although whether different important government
company system program development history national general social political economic international community
information education university research science society public service report level market process policy theory
analysis method result value model function structure example effect practice experience relationship environment
knowledge energy material industry production management organization individual particular available according
including following provide become include continue consider require expect suggest receive support describe create
allow believe understand increase reduce improve compare explain represent establish determine achieve maintain
century member president council american english british french german european western southern northern eastern
million percent population district church station battle military force army team season league club player album
film television series character published version original title novel author written released award director
"""

CODE_WORDS = """
def return self import from class if else elif for while in not None True False try except finally raise with
as lambda yield assert pass break continue global print len range list dict set tuple str int float bool bytes object
super init name main args kwargs key value item index count size length shape dtype device tensor torch numpy array
zeros ones random seed batch loss model train eval step optimizer gradient weight bias layer hidden state config path
file open read write close json load save data node next prev head tail left right root parent child const let var
function async await export default public private static void char double struct enum switch case new this null true
false include define typedef template typename namespace std vector string map pair auto where select insert update
delete table column row query index error exception message code test assert equal result response request server
client http https url host port token user password email
"""

CODE_LINES = (
    "    def {a}(self, {b}: int, {c}: str = None) -> {a}:\n        return self.{b}[{c}] + {n}\n",
    '        if {a} is not None and {b} >= {n}:\n            raise ValueError(f"{a} is {{{b}}}")\n',
    "for {a}, {b} in enumerate({c}):\n    print({a}, {b})\n",
    "from {a}.{b} import {c}\nimport {b}\n\n\n",
    '{{"{a}": {n}, "{b}": "{c}", "{c}": [{n}, {n}]}}\n',
    "int {a}(const char *{b}, size_t {c}) {{\n    for (int i = 0; i < {n}; i++) {{\n        {b}[i] = 0;\n    }}\n}}\n",
    "# {a} {b} {c}\n{a} = {b}({c}={n})\n",
    "SELECT {a}, {b} FROM {c} WHERE {a} = {n};\n",
    "| {a} | {b} | {n} |\n|---|---|---|\n",
    "## {a} {b}\n\n- {c}: `{a}`\n- **{b}**\n\nhttps://www.{a}.com/{b}/{c}.html\n",
)


def inflections(word: str) -> tuple[str, ...]:
    stem = word[:-1] if word.endswith("e") else word
    return (
        word,
        word,
        word,
        f"{word}s",
        f"{stem}ed",
        f"{stem}ing",
        f"{stem}er",
        f"{word}ly",
        f"un{word}",
        f"{stem}ation",
    )


def corpus() -> Iterator[str]:
    rng = random.Random(1)
    everyday, code = EVERYDAY_WORDS.split(), CODE_WORDS.split()
    inflected = [form for word in everyday for form in inflections(word)]
    for _ in range(6000):
        words = rng.choices(everyday, k=6) + rng.choices(inflected, k=6)
        rng.shuffle(words)
        sentence = " ".join(words).capitalize()
        yield f"{sentence}{rng.choice('..,;?!')} {rng.choice(words).title()} {rng.randrange(2100)}.\n"
        yield " ".join(rng.choices(WORDS, k=12))
        a, b, c = rng.choices(code, k=3)
        yield rng.choice(CODE_LINES).format(a=a, b=b, c=c, n=rng.randrange(1000))
        one, two, three, four, five = rng.choices(words, k=5)
        yield f"{one}'s {two}n't ({three}) \"{four}\" — “{five}”\n"


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    split = [word for word in WORDS if len(tokenizer.encode(f" {word}").ids) != 1]
    if split or tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"vocabulary {tokenizer.get_vocab_size()}, words in several tokens: {split}")
    TARGET.write_text(tokenizer.to_str(), encoding="utf-8")
    print(f"{TARGET.name}: {tokenizer.get_vocab_size()} tokens, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
