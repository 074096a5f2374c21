"""Extracts the words that determine a text's topic: letters only, without stop words."""

from __future__ import annotations

import re

from riptide.base.unicode import normalize

MIN_LETTERS = 3
_WORD = re.compile(rf"[^\W\d_]{{{MIN_LETTERS},}}")

# English function words of at least three letters, and the stems of contractions ("doesn't": "doesn").
_STOP_WORDS = """
    about above across after afterwards again against ain all almost alone along already also although always among
    amongst and another any anybody anyone anything anyway anywhere are aren around because been before beforehand
    behind being below beside besides between beyond both but can cannot cant could couldn did didn does doesn doing
    don done down due during each either else elsewhere enough etc even ever every everybody everyone everything
    everywhere except few for former from further furthermore get gets give given gives got had hadn has hasn have
    haven having hence her here hers herself him himself his how however indeed instead into isn its itself just let
    like made mainly make makes many may maybe meanwhile might mightn mine more moreover most mostly much must mustn
    myself namely near nearly need needn neither never nevertheless nobody non none nor not nothing now nowhere off
    often once one ones only onto other others otherwise ought our ours ourselves out over own per perhaps please
    quite rather really regarding said same say says seem seemed seeming seems several shall shan she should shouldn
    since some somebody somehow someone something sometime sometimes somewhat somewhere still such take taken than
    that the their theirs them themselves then thence there thereafter thereby therefore therein these they this
    those though through throughout thus together too toward towards two under unless unlike unlikely until upon use
    used uses using various very via was wasn well were weren what whatever when whenever where whereas whereby
    wherein wherever whether which while who whoever whole whom whose why will with within without won would wouldn
    yet you your yours yourself yourselves
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


def topic_words(text: str) -> list[str]:
    """Returns the words that determine a text's topic, in order, with repetitions.

    A word is a run of at least three letters of any script, in lower case (and in Unicode's form NFC, so that an accent
    has one spelling). Stop words (English) are left out.
    """
    return [word for word in _WORD.findall(normalize("NFC", text).lower()) if word not in STOP_WORDS]
