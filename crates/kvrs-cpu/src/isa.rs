//! Which instruction set the kernels use: the best that the CPU has, or a lower one that `KVRS_ISA` names.

use kvrs_core::{Error, Result};
use std::sync::OnceLock;

const VARIABLE: &str = "KVRS_ISA";

/// An instruction set that kernels exist for; a larger one includes the smaller ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Portable code: the meaning that the others are tested against.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ, VBMI and VNNI, beside AVX2.
    Avx512,
}

impl Isa {
    const ALL: [Self; 3] = [Self::Scalar, Self::Avx2, Self::Avx512];

    /// The name that `KVRS_ISA` knows it by.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// The best one that this CPU has.
    #[must_use]
    pub fn detected() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use crate::x86::{avx2::Avx2, avx512::Avx512};
            if Avx512::detect().is_some() {
                return Self::Avx512;
            }
            if Avx2::detect().is_some() {
                return Self::Avx2;
            }
        }
        Self::Scalar
    }

    /// All that this CPU can run, best last, whatever `KVRS_ISA` says.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::up_to(Self::detected())
    }

    /// The one that stores of this process use: `KVRS_ISA`, read once, or the best.
    ///
    /// # Errors
    /// [`Error::Argument`] if `KVRS_ISA` names none, or one that this CPU has not.
    pub fn chosen() -> Result<Self> {
        static CHOSEN: OnceLock<Result<Isa>> = OnceLock::new();
        let read = || {
            let value = std::env::var_os(VARIABLE);
            Self::parse(value.as_deref().map(|v| v.to_string_lossy()).as_deref(), Self::detected())
        };
        CHOSEN.get_or_init(read).clone()
    }

    /// The one that a value of `KVRS_ISA` chooses on a CPU whose best is `detected`; `None`: the variable is not set.
    ///
    /// # Errors
    /// [`Error::Argument`] for a name that is unknown or higher than `detected`.
    pub fn parse(value: Option<&str>, detected: Self) -> Result<Self> {
        let Some(value) = value else { return Ok(detected) };
        let known = Self::up_to(detected).find(|isa| isa.name() == value);
        known.ok_or_else(|| Error::argument(VARIABLE, format!("{value:?}"), Self::allowed(detected)))
    }

    fn up_to(best: Self) -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(move |isa| *isa <= best)
    }

    /// "scalar, avx2 (this CPU has no avx512)"
    fn allowed(detected: Self) -> String {
        let names = |isas: &mut dyn Iterator<Item = Self>| isas.map(Self::name).collect::<Vec<_>>();
        let have = names(&mut Self::up_to(detected)).join(", ");
        let missing = names(&mut Self::ALL.into_iter().filter(|isa| *isa > detected)).join(" or ");
        if missing.is_empty() { have } else { format!("{have} (this CPU has no {missing})") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{require, required};

    #[test]
    fn without_a_wish_the_best_is_chosen() {
        for best in Isa::ALL {
            assert_eq!(Isa::parse(None, best), Ok(best));
        }
    }

    #[test]
    fn a_wish_lowers_the_choice_and_never_raises_it() {
        for best in Isa::ALL {
            for wish in Isa::ALL {
                let got = Isa::parse(Some(wish.name()), best);
                assert_eq!(got.is_ok(), wish <= best);
                assert!(got.is_err() || got == Ok(wish));
            }
        }
    }

    #[test]
    fn the_error_names_the_wish_and_what_the_cpu_has() {
        let message = |wish, best| Isa::parse(Some(wish), best).unwrap_err().to_string();
        let allowed = "allowed: scalar, avx2 (this CPU has no avx512)";
        assert_eq!(message("avx512", Isa::Avx2), format!("KVRS_ISA is \"avx512\"; {allowed}"));
        assert_eq!(message("bogus", Isa::Avx2), format!("KVRS_ISA is \"bogus\"; {allowed}"));
        assert_eq!(
            message("AVX2", Isa::Scalar),
            "KVRS_ISA is \"AVX2\"; allowed: scalar (this CPU has no avx2 or avx512)"
        );
        assert_eq!(message("", Isa::Avx512), "KVRS_ISA is \"\"; allowed: scalar, avx2, avx512");
    }

    #[test]
    fn the_available_ones_end_in_the_detected_one() {
        let available: Vec<_> = Isa::available().collect();
        assert!(available.is_sorted() && available[0] == Isa::Scalar);
        assert_eq!(available.last(), Some(&Isa::detected()));
    }

    #[test]
    fn required_instruction_sets_are_there_and_the_others_are_named() {
        for isa in Isa::ALL {
            assert!(require(isa) || !required(isa.name()));
        }
        eprintln!("exercised here: {}", Isa::available().map(Isa::name).collect::<Vec<_>>().join(", "));
    }
}
