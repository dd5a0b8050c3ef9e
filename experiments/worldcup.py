"""The two-player example of CacheBlend's figures 3 and 4: two chunks about two footballers, and questions over both.

The texts were written for this project (Apache-2.0); the facts are those of the World Cups up to 2022.
"""

from __future__ import annotations

from experiments.datasets import TASKS, Case, Dataset, Document

MESSI = Document(
    "Lionel Messi at the FIFA World Cup",
    "Lionel Messi played for Argentina at five FIFA World Cups. At his first, in Germany in 2006, he came on as a "
    "substitute against Serbia and Montenegro and scored 1 goal. In South Africa in 2010 he scored none. In Brazil in "
    "2014 he scored 4 goals, all in the group stage, and Argentina lost the final. In Russia in 2018 he scored 1 goal, "
    "against Nigeria. In Qatar in 2022 he scored 7 goals, two of them in the final against France, and lifted the "
    "trophy as captain. Up to and including 2022 that makes 13 goals in 26 World Cup matches.",
    gold=True,
)
RONALDO = Document(
    "Cristiano Ronaldo at the FIFA World Cup",
    "Cristiano Ronaldo also played at the five World Cups from 2006 to 2022, for Portugal. He scored 1 goal in 2006, "
    "a penalty against Iran, and Portugal came fourth, its best result with him. He scored 1 goal in 2010 against "
    "North Korea and 1 in 2014 against Ghana. In 2018 he scored 4 goals, a hat-trick against Spain among them. With a "
    "penalty against Ghana in 2022 he became the first man to score at five World Cups. Up to and including 2022 that "
    "makes 8 goals in 22 matches, none of them in the knockout rounds.",
    gold=True,
)

QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("How many goals did Messi score more than Cristiano Ronaldo at FIFA World Cups?", ("5", "five")),
    ("Who scored more goals at FIFA World Cups, Messi or Cristiano Ronaldo?", ("Messi", "Lionel Messi")),
    ("How many goals did Cristiano Ronaldo score at FIFA World Cups?", ("8", "eight")),
    ("For which country did Messi play?", ("Argentina",)),
)

WORLD_CUP = Dataset(
    name="worldcup",
    source="written for this project",
    cases=tuple(
        Case(f"worldcup-{i}", question, answers, (MESSI, RONALDO)) for i, (question, answers) in enumerate(QUESTIONS)
    ),
    task=TASKS["musique"],
)
